# SPDX-License-Identifier: Apache-2.0
"""Flags of `dschat plan`, beside which it takes those of the planned step."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from dschat.base.steps import STEPS, STEPS_BY_COMMAND
from dschat.settings.flags import ABOVE_0, AT_LEAST_1, check_values, flag


def step_name(word: str) -> str:
    """A value of --step as the name of a subcommand."""
    for step in STEPS.values():
        if word in (step.command, step.plan_name):
            return step.command
    return word


@dataclass(kw_only=True)
class PlanOptions:
    """Estimate a run's memory per GPU and per node, its updates and samples, without loading any weights.

        dschat plan tldr_gemma_2b --step ppo               # a preset, or a YAML file
        dschat plan tldr_gemma_7b --gpus 4 --zero_stage 3  # flags of the step override the preset's
        dschat plan --step ppo --actor_model_name_or_path …
        dschat plan tldr_gemma_7b --step ppo --gpus 4 --gpu_memory 40   # which flags make it fit

    Exit status 1 where it does not fit, 2 after an error.
    """

    usage: ClassVar[str] = "%(prog)s [PRESET] [flags, also those of the step]"
    other_words: ClassVar[list[str]] = []  # a preset's name, and flags of the step

    step: Annotated[str | None, step_name] = flag(
        "training step to plan: sft (1), reward (2), dpo, ppo (3), refuel (on pairs) or refuel-online; all steps of"
        " the preset if not given",
        None,
        choices=tuple(STEPS_BY_COMMAND),
    )
    gpus: int = flag("number of GPUs on all nodes together, with one process each", 8, AT_LEAST_1)
    gpus_per_node: int = flag("number of GPUs per node", 8, AT_LEAST_1)
    gpu_memory: float | None = flag("memory per GPU in GB; that of --gpu_type, or 80, if not given", None, ABOVE_0)
    gpu_type: str | None = flag(
        "also estimate tokens per second: the GPU's name (a100-80gb, h100-sxm, h200, …), or TFLOP/s and GB/s of its"
        " data sheet, such as 989,4800",
        None,
    )
    main_memory: float | None = flag("main memory per node in GB, checked against what the run needs", None, ABOVE_0)
    num_samples: int | None = flag(
        "number of training rows; counted in the data if not given", None, AT_LEAST_1, aliases=["--prompts"]
    )
    config: str | None = flag(
        "folder or hub id whose model config stands in for models that do not exist yet", None, path=True
    )
    json: bool = flag("print JSON, with sizes in bytes", False)

    def __post_init__(self) -> None:
        """Raises UserError, which names the flag."""
        check_values(self)
