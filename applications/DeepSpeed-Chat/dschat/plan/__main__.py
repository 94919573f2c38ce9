# SPDX-License-Identifier: Apache-2.0
"""What a run will take: memory of each GPU and of the node, updates and samples; weights are not needed.

    python -m dschat.plan tldr_gemma_2b --step 3               # a training script, by name or path
    python -m dschat.plan tldr_gemma_7b --gpus 4 --zero_stage 3  # with flags that win over the script's
    python -m dschat.plan --step 3 --actor_model_name_or_path …  # the flags of a step's main.py
    python -m dschat.plan tldr_gemma_7b --step 3 --gpus 4 --gpu_memory 40 --recommend  # which flags make it fit

Exit status 1 where it does not fit, 2 after an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from dschat.common.script import run_script
from dschat.config.common import CommonConfig
from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelConfig, RefuelOnlineConfig
from dschat.config.supervised import DPOConfig, RewardConfig, SFTConfig
from dschat.errors import UserError
from dschat.plan.micro_batches import Choice, choices
from dschat.plan.models import find_config
from dschat.plan.phases import GB, Machine
from dschat.plan.plan import Plan, make_plan, remedies
from dschat.plan.presets import Preset, Step, find_presets, flags_of
from dschat.plan.recommend import Recommendation, advice, advice_json, recommend
from dschat.plan.report import Counts, Remedies, as_json, as_text, counts, find_rows

CONFIGS: dict[Step, type[CommonConfig]] = {
    **{1: SFTConfig, 2: RewardConfig, "dpo": DPOConfig, 3: PPOConfig},
    **{"refuel": RefuelConfig, "refuel_online": RefuelOnlineConfig},
}
# No run starts, so that it does not matter what an output folder holds.
NOWHERE = ["--output_dir", "planned/nowhere", "--overwrite_output_dir"]


@dataclass(frozen=True)
class Planned:
    """A plan and what is said with it."""

    title: str
    plan: Plan
    counts: Counts | None
    remedies: Remedies
    micro_batches: Sequence[Choice]
    recommendation: Recommendation | None = None

    def text(self) -> str:
        """The report."""
        found = as_text(self.title, self.plan, self.counts, self.remedies, self.micro_batches)
        return found if self.recommendation is None else f"{found}\n\n{advice(self.recommendation)}"

    def json(self) -> dict[str, object]:
        """The report as numbers."""
        found = as_json(self.title, self.plan, self.counts, self.remedies, self.micro_batches)
        return found if self.recommendation is None else found | {"recommendation": advice_json(self.recommendation)}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints plans; returns the exit status. The arguments are the process's if `argv` is None."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and not words[0].startswith("-") else None
    own, flags = _parser().parse_known_args(words)
    planned: list[Planned] = []

    def run() -> str:
        machine = _machine(own)
        asked = Asked(own.prompts, own.micro_batches, own.recommend)
        if name is not None:
            for preset in find_presets(name, own.step):
                planned.append(plan_preset(preset, machine, flags, own.config, asked))
        elif own.step is None:
            raise UserError(f"give a training script, or --step {', '.join(map(str, CONFIGS))} with its flags.")
        else:
            configs = _configs(own.config, None)
            planned.append(_planned(f"step {own.step}", own.step, flags, machine, configs, asked))
        if own.json:
            return json.dumps([p.json() for p in planned], indent=2)
        return "\n\n\n".join(p.text() for p in planned)

    status = run_script(run, print)
    return status or int(not all(p.plan.fits for p in planned))


@dataclass(frozen=True)
class Asked:
    """What a plan is to say."""

    prompts: int | None = None  # training rows; those of the data where None
    micro_batches: bool = False  # the largest that fit
    recommend: bool = False  # the flags that fit, and the plan with them


def plan_preset(
    preset: Preset, machine: Machine, flags: Sequence[str] = (), config: str | None = None, asked: Asked = Asked()
) -> Planned:
    """Plans what a training script starts.

    Args:
        preset: the script.
        machine: for which.
        flags: given to the script.
        config: what to take for folders that are not there yet; the published model where None.
        asked: what it is to say.

    Raises:
        UserError: see `flags_of`, `make_plan`, `recommend` and `counts`.
    """
    words = flags_of(preset, machine.processes, flags)
    return _planned(preset.script.name, preset.step, words, machine, _configs(config, preset.base), asked)


def _planned(
    title: str,
    step: Step,
    flags: Sequence[str],
    machine: Machine,
    configs: Callable[[str, str], PreTrainedConfig],
    asked: Asked,
) -> Planned:
    data = [] if {"--data_path", "--task.query_dataset"} & {*flags} else ["--data_path", "unnamed"]
    config = parse(CONFIGS[step], [*flags, *data, *NOWHERE], runs_here=False)
    found = recommend(config, machine, configs) if asked.recommend else None
    plan = found.best.plan if found and found.best else None
    plan = plan or make_plan(config, machine, configs)
    rows = find_rows(config) if asked.prompts is None else (asked.prompts, 0)
    counted = None if rows is None else counts(plan.config, plan.config.plan_batches(plan.machine.processes), *rows)
    helps = [] if plan.fits or found else remedies(plan, configs)
    return Planned(title, plan, counted, helps, choices(plan) if asked.micro_batches else [], found)


def _configs(given: str | None, base: str | None) -> Callable[[str, str], PreTrainedConfig]:
    """(path, flag) → config. For a folder that an earlier step will write, that of `given`, else of `base`."""
    found: dict[str, PreTrainedConfig] = {}

    def find(path: str, flag: str) -> PreTrainedConfig:
        made_later = not Path(path).exists() and (path.startswith("/") or path.count("/") > 1)
        name = given or base if made_later else path
        name, of = name or path, "--config" if made_later and given else flag
        if name not in found:
            found[name] = find_config(name, of)
        return found[name]

    return find


def _machine(own: argparse.Namespace) -> Machine:
    for name in ("gpus", "gpus_per_node", "gpu_memory", "main_memory", "prompts"):
        value = getattr(own, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value}: give a number above 0.")
    main_memory = None if own.main_memory is None else int(own.main_memory * GB)
    return Machine(own.gpus, int(own.gpu_memory * GB), main_memory, own.gpus_per_node)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dschat.plan",
        usage="%(prog)s [SCRIPT] [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All other flags are the step's own; `main.py --help` lists them.",
    )
    steps = "1, 2 (reward model), dpo, 3, refuel (on pairs) or refuel_online; all that a script's name has"
    parser.add_argument("--step", type=_step, choices=tuple(CONFIGS), help=steps)
    parser.add_argument("--gpus", type=int, default=8, help="processes, each with a GPU (default: 8)")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="of them on one machine (default: 8)")
    parser.add_argument("--gpu_memory", type=float, default=80, help="GB of a GPU (default: 80)")
    parser.add_argument("--main_memory", type=float, help="GB of main memory of a node, to be compared with the need")
    parser.add_argument("--prompts", type=int, help="training rows; by default those of the data")
    parser.add_argument("--config", help="folder or hub id of the model in folders that are not there yet")
    most = "also the largest micro-batches that fit, with gradient checkpointing and without (takes longer)"
    parser.add_argument("--micro_batches", action="store_true", help=most)
    best = "step 3: also the flags that make it fit, what then stands on which GPU, and the other ways of drawing"
    parser.add_argument("--recommend", action="store_true", help=best)
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    return parser


def _step(word: str) -> Step:
    return int(word) if word.isdigit() else word


if __name__ == "__main__":
    sys.exit(main())
