# SPDX-License-Identifier: Apache-2.0
"""`dschat plan`: what a run will take, of a preset, a file or flags."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from dschat.base.errors import UserError
from dschat.plan.models import Configs, find_config
from dschat.plan.phases import GB, Machine
from dschat.plan.plan import make_plan, remedies
from dschat.plan.recommend import recommend
from dschat.plan.report import PlanReport, choices, counts, find_rows, find_sources
from dschat.plan.throughput import DEFAULT_MEMORY, expect, named_gpu
from dschat.settings.common import CommonConfig
from dschat.settings.parse import resolve
from dschat.settings.plan import STEPS, PlanOptions
from dschat.settings.ppo import PPOConfig
from dschat.settings.presets import find_preset, preset_names
from dschat.settings.refuel import RefuelConfig, RefuelOnlineConfig
from dschat.settings.supervised import DPOConfig, RewardConfig, SFTConfig

# No run starts, so that it does not matter what an output folder holds.
NOWHERE = ["--output_dir", "planned/nowhere", "--overwrite_output_dir"]
CONFIGS: dict[str, type[CommonConfig]] = {
    "sft": SFTConfig,
    "reward": RewardConfig,
    "dpo": DPOConfig,
    "ppo": PPOConfig,
    "refuel": RefuelConfig,
    "refuel-online": RefuelOnlineConfig,
}
SHIM = re.compile(r"-m dschat (\S+) --config (\S+)")  # of a training script


def run(options: PlanOptions) -> int:
    """Prints plans; the exit status."""
    flags = list(options.other_words)
    name = flags.pop(0) if flags and not flags[0].startswith("-") else None
    if name is None and options.config and Path(options.config).suffix in (".yaml", ".yml"):
        raise UserError(f"--config {options.config}: here that is a model; for a settings file: dschat plan FILE.")
    if name is not None:
        files: list[tuple[str, str | None]] = [*find_files(name, options.step)]
    elif options.step is None:
        raise UserError(f"give a preset, or --step {', '.join(STEPS)} with its flags.")
    else:
        files = [(options.step, None)]
    planned = [plan_step(step, options, flags, file) for step, file in files]
    shown = [one.json() if options.json else one.text() for one in planned]
    print(json.dumps(shown, indent=2) if options.json else "\n\n\n".join(map(str, shown)))
    return int(not all(one.plan.fits for one in planned))


def find_files(name: str, step: str | None) -> list[tuple[str, str]]:
    """Subcommands and the file or preset of each that a name means, in the order of the steps.

    The name is that of a preset that is shipped, or the path of a YAML file or of a training script.

    Raises:
        UserError: there is none, or none of the step.
    """
    path = Path(name)
    if path.is_file() and path.suffix == ".sh":
        called = SHIM.search(path.read_text(encoding="utf-8"))
        if called is None:
            raise UserError(f"{name} is none of the training scripts; give one of them, a YAML file or a preset.")
        return [(called[1], called[2])]
    if path.is_file():
        if step is None:
            raise UserError(f"{name}: --step is missing: say which step's flags the file holds, {', '.join(STEPS)}.")
        return [(step, name)]
    found = [(command, name.removesuffix(".sh")) for command in STEPS if find_preset(command, name)]
    found = [one for one in found if step in (None, one[0])]
    if not found:
        known = sorted({preset for command in STEPS for preset in preset_names(command)})
        of_step = f" of {step}" if step else ""
        raise UserError(f"{name}: there is no such preset{of_step}. Give a YAML file, or one of {', '.join(known)}.")
    return found


def plan_step(step: str, options: PlanOptions, flags: Sequence[str] = (), file: str | None = None) -> PlanReport:
    """Plans what a subcommand would train with flags, which win over those of the file or preset.

    Raises:
        UserError: see `resolve`, `make_plan`, `recommend` and `counts`.
    """
    main_memory = None if options.main_memory is None else int(options.main_memory * GB)
    gpu = None if options.gpu_type is None else named_gpu(options.gpu_type)
    of_name = None if gpu is None else gpu.memory
    device_memory = int((options.gpu_memory or of_name or DEFAULT_MEMORY) * GB)
    machine = Machine(options.gpus, device_memory, main_memory, options.gpus_per_node)
    data = [] if file or {"--data_path", "--task.query_dataset"} & {*flags} else ["--data_path", "unnamed"]
    words = [*flags, *data, *NOWHERE]
    told = resolve(CONFIGS[step], words, command=step, processes=machine.processes, runs_here=False, config=file)
    configs = _configs(options.config, told.preset.get("base"))
    found = recommend(told.config, machine, configs) if options.recommend else None
    plan = found.best.plan if found and found.best else None
    plan = plan or make_plan(told.config, machine, configs)
    sources = None if options.num_samples is not None else find_sources(told.config)
    rows = None if sources is None else find_rows(sources)
    rows = (options.num_samples, 0) if options.num_samples is not None else rows
    counted = None if rows is None else counts(plan.config, plan.config.plan_batches(plan.machine.processes), *rows)
    helps = [] if plan.fits or found else remedies(plan, configs)
    title = f"dschat {step}{f' --config {file}' if file else ''}"
    largest = choices(plan) if options.micro_batches else []
    expectation = None if gpu is None else expect(plan, gpu)
    return PlanReport(title, plan, counted, helps, largest, found, sources or (), expectation)


def _configs(given: str | None, base: str | None) -> Configs:
    """For a folder that an earlier step will write, that of `given`, else of `base`."""
    found: dict[str, PreTrainedConfig] = {}

    def find(path: str, flag: str) -> PreTrainedConfig:
        made_later = not Path(path).exists() and (path.startswith("/") or path.count("/") > 1)
        name = given or base if made_later else path
        name, of = name or path, "--config" if made_later and given else flag
        if name not in found:
            found[name] = find_config(name, of)
        return found[name]

    return find
