# SPDX-License-Identifier: Apache-2.0
"""`dschat plan`: the memory and the updates of a run that is given by a preset, a settings file or flags."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from dschat.base.errors import UserError
from dschat.base.steps import STEPS_BY_COMMAND
from dschat.plan.counts import Counts, count_run, find_sources
from dschat.plan.models import ConfigLoader
from dschat.plan.options import PlanOptions
from dschat.plan.phases import GB, Machine
from dschat.plan.plan import Plan, make_plan
from dschat.plan.published import find_config
from dschat.plan.remedies import remedies
from dschat.plan.report import PlanReport
from dschat.plan.throughput import DEFAULT_MEMORY, expect, named_gpu
from dschat.settings.parse import resolve
from dschat.settings.presets import find_preset, preset_names

logger = logging.getLogger(__name__)

# A plan starts no run, but the flags of a step are checked together with an output folder.
OUTPUT_FLAGS = ["--output_dir", "planned/nowhere", "--overwrite_output_dir"]
# The flag of a step's data, in each of its spellings.
DATA_FLAG = re.compile(r"--(data[_-]path|task\.query[_-]dataset)(=|$)")


def run(options: PlanOptions) -> int:
    """Prints the plans of all steps that the options name. Returns the exit status: 1 if one of them does not fit."""
    flags = list(options.other_words)
    name = flags.pop(0) if flags and not flags[0].startswith("-") else None
    files: list[tuple[str, str | None]] = []
    if name is not None:
        files += find_files(name, options.step)
    elif options.step is not None:
        files.append((options.step, None))
    else:
        raise UserError(f"nothing to plan: give a preset, or --step ({', '.join(STEPS_BY_COMMAND)}) with its flags.")

    reports = [plan_step(step, options, flags, file) for step, file in files]
    if options.json:
        print(json.dumps([report.json() for report in reports], indent=2))
    else:
        print("\n\n\n".join(report.text() for report in reports))
    return int(not all(report.plan.fits for report in reports))


def find_files(name: str, step: str | None) -> list[tuple[str, str]]:
    """The subcommands to plan, each with its settings file or preset, in the order of the steps.

    Args:
        name: a preset of the package, or the path of a YAML file.
        step: subcommand to plan; None for all that the preset has.

    Raises:
        UserError: there is no such file or preset.
    """
    path = Path(name)
    if path.is_file():
        if step is None:
            raise UserError(
                f"{name}: --step is missing: name the step whose flags the file holds ({', '.join(STEPS_BY_COMMAND)})."
            )
        return [(step, name)]

    files = []
    for subcommand in STEPS_BY_COMMAND:
        if step in (None, subcommand) and find_preset(subcommand, name):
            files.append((subcommand, name.removesuffix(".sh")))
    if not files:
        raise UserError(_unknown_preset(name, step))
    return files


def _unknown_preset(name: str, step: str | None) -> str:
    """The message for a preset that does not exist, with the names of those that do."""
    if name in STEPS_BY_COMMAND:
        return f"{name} is a step: write --step {name}, with a preset, a YAML file or the flags of the step."
    names: set[str] = set()
    for subcommand in [step] if step else STEPS_BY_COMMAND:
        names.update(preset_names(subcommand))
    of_step = f" of {step}" if step else ""
    return f"{name}: there is no such preset{of_step}. Give a YAML file, or one of {', '.join(sorted(names))}."


def plan_step(step: str, options: PlanOptions, flags: Sequence[str] = (), file: str | None = None) -> PlanReport:
    """Plans a training run of one subcommand.

    Args:
        step: the subcommand.
        options: flags of `dschat plan`.
        flags: flags of the subcommand, which override those of the file.
        file: a preset or a settings file.

    Raises:
        UserError: see `resolve`, `make_plan` and `count_run`.
    """
    machine = _machine(options)
    training_step = STEPS_BY_COMMAND[step]

    # Settings. A plan needs no data, although the step does.
    arguments = [*flags, *OUTPUT_FLAGS]
    if file is None and not any(DATA_FLAG.match(word) for word in flags):
        arguments += ["--data_path", "unnamed"]
    settings = resolve(
        training_step.flags_class(), arguments, command=step, processes=machine.processes, runs_here=False, config=file
    )

    # Memory.
    load_config = _config_loader(options.config, settings.preset.get("base"))
    plan = make_plan(settings.config, machine, load_config)

    # Updates and samples.
    sources = find_sources(plan.config) if options.num_samples is None else None
    title = f"dschat {step}"
    if file:
        title += f" --config {file}"
    return PlanReport(
        step=training_step,
        title=title,
        plan=plan,
        counts=_counts(plan, options, sources),
        remedies=[] if plan.fits else remedies(plan, load_config),
        sources=sources or (),
        expectation=None if options.gpu_type is None else expect(plan, options.gpu_type),
    )


def _machine(options: PlanOptions) -> Machine:
    """The machine that the flags describe."""
    memory_of_type = DEFAULT_MEMORY if options.gpu_type is None else named_gpu(options.gpu_type).memory
    gpu_memory = options.gpu_memory or memory_of_type
    main_memory = None
    if options.main_memory is not None:
        main_memory = int(options.main_memory * GB)
    return Machine(options.gpus, int(gpu_memory * GB), main_memory, options.gpus_per_node)


def _counts(plan: Plan, options: PlanOptions, sources: list[dict[str, Any]] | None) -> Counts | None:
    """Updates and samples, from --num_samples or else from the rows of the data; None if neither is known."""
    batches = plan.config.plan_batches(plan.machine.processes)
    if options.num_samples is not None:
        return count_run(plan.config, batches, options.num_samples)
    if sources is None:
        return None
    train_rows = sum(source["train"] for source in sources)
    return count_run(plan.config, batches, train_rows)


def _config_loader(config_flag: str | None, base: str | None) -> ConfigLoader:
    """Returns a function that finds the config of a model.

    A model that an earlier step will write does not exist yet: it has the config of --config, or of the preset's base
    model, which a warning says where its name might also be one of the hub.
    """
    stand_in = config_flag or base

    @cache
    def find(path: str, flag: str) -> PreTrainedConfig:
        exists = Path(path).exists()
        is_folder_by_name = path.startswith(("/", ".")) or path.count("/") > 1
        if exists or not stand_in:
            return find_config(path, flag)
        if not is_folder_by_name:
            try:
                return find_config(path, flag)
            except UserError:
                logger.warning("%s %s: no such model yet; planned with the config of %s", flag, path, stand_in)
        return find_config(stand_in, "--config" if config_flag else flag)

    return find
