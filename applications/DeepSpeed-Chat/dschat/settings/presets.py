# SPDX-License-Identifier: Apache-2.0
"""Presets that are shipped: files of flags for published runs, found by name, with one key more than other files.

    preset:
      run: tldr-gemma-2b           # the run's folder below $PROJ_PATH/models, DATA-MODEL
      model: google/gemma-2b       # $MODEL where it is not set; sft is what step 1 of the same run wrote
      data: openai/summarize_from_feedback   # $DATA where it is not set
      base: google/gemma-2b        # published model that all of the run's models are made from, for the memory plan
      most_per_gpu:                # most examples of a process that fit into a GPU's memory
        per_device_train_batch_size: 4

Their values may name PROJ_PATH (the current folder where it is not set), MODEL, DATA, REWARD_MODEL and RUN, the run's
folder. Another model or data set takes its place in that folder's name.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.settings.batches import largest_part

PRESETS = Path(__file__).resolve().parents[1] / "presets"
STEP_1 = "sft"  # the model that step 1 of the same run wrote
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
VAGUE = re.compile(r"(actor|ppo|refuel|train).*|dpo|pairs|models|step-.*")  # names that say little on their own
TRAIN = "per_device_train_batch_size"
TRAINING = "per_device_training_batch_size"
GENERATION = "per_device_generation_batch_size"
GLOBAL = "global_batch_size"
SAMPLES = "samples_per_prompt"


def preset_names(command: str) -> list[str]:
    """Names of the presets of a subcommand."""
    names = [file.stem for file in (PRESETS / command).glob("*.yaml")]
    return sorted(name for name in names if not name.startswith("_"))


def find_preset(command: str, name: str) -> Path | None:
    """The file of a preset by its name, with or without suffix."""
    file = PRESETS / command / f"{name.removesuffix('.yaml').removesuffix('.sh')}.yaml"
    return file if file.is_file() and Path(name).name == name else None


def variables(preset: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that a preset's values may name, with their values."""
    project = environ.get("PROJ_PATH") or os.getcwd()
    usual_data = str(preset["data"]).replace("${PROJ_PATH}", project)
    usual_model = str(preset["model"])
    data_name, _, model_name = str(preset["run"]).partition("-")
    data = environ.get("DATA") or usual_data
    model = environ.get("MODEL") or usual_model
    if data != usual_data:
        data_name = _short_name(data)
    runs = Path(project) / "models"
    if model != usual_model:
        folder = Path(model)
        is_of_step_1 = folder.name == STEP_1 and folder.parent.parent == runs
        model_name = folder.parent.name if is_of_step_1 else _short_name(model)
        model_name = model_name.removeprefix(f"{data_name}-")
    run_name = "-".join(name for name in (data_name, model_name) if name)
    run = runs / run_name
    if model == STEP_1:
        model = str(run / STEP_1)
    reward_model = preset.get("reward_model", run / "reward")
    return {
        "PROJ_PATH": project,
        "MODEL": model,
        "DATA": data,
        "REWARD_MODEL": environ.get("REWARD_MODEL") or str(reward_model),
        "RUN": str(run),
    }


def batch_sizes(limits: Mapping[str, int], values: Mapping[str, int], processes: int) -> dict[str, int]:
    """Batch sizes of a preset by flag, for a number of processes.

    A size is the largest divisor of a process's share of the global batch that does not exceed its limit. In step 3 a
    rollout holds the responses of one update, and all --samples_per_prompt of a prompt are on one process.

    Args:
        limits: by flag, the most examples (in step 3: responses) of a process; empty without a preset.
        values: by flag, the global batch and what else the user or the preset gives.
        processes: number of processes that share the global batch.

    Raises:
        UserError: the global batch cannot be shared evenly.
    """
    global_batch = values.get(GLOBAL) or 0
    samples = values.get(SAMPLES) or 1
    if not limits or min(global_batch, samples, processes) < 1:  # the ranges of the flags refuse numbers below 1
        return {}
    if global_batch % (processes * samples):
        raise _uneven(global_batch, samples, processes)
    share = global_batch // processes

    sizes: dict[str, int] = {}
    for name in (TRAIN, TRAINING):
        if name in limits:
            sizes[name] = largest_part(share, limits[name])
    if GENERATION in limits:
        prompts = share // samples
        most_prompts = max(1, limits[GENERATION] // samples)
        sizes[GENERATION] = largest_part(prompts, most_prompts)
        generation_batch = values.get(GENERATION) or sizes[GENERATION]
        sizes["generation_batches"] = max(1, prompts // generation_batch)
    return sizes


def _uneven(global_batch: int, samples: int, processes: int) -> UserError:
    """Error for a global batch that cannot be shared evenly, with one that can."""
    together = f", {samples} responses of a prompt together" if samples > 1 else ""
    unit = processes * samples
    nearest = global_batch // unit * unit or unit
    return UserError(
        f"{processes} GPUs cannot share the global batch of {global_batch} evenly{together}: give another number of"
        f" GPUs by --num_gpus (NUM_GPUS), or add --global_batch_size {nearest} or another multiple of {unit}."
    )


def _short_name(path: str) -> str:
    """The last part of a path, without the suffix of a data file; with the part before if it says little."""
    path = path.rstrip("/").removesuffix("/sft").removesuffix(".gz")
    folder, _, name = path.rpartition("/")
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    if VAGUE.fullmatch(name) and folder:
        name = f"{_short_name(folder)}-{name}"
    return re.sub(r"[^\w.-]", "-", name)
