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
VAGUE = re.compile(r"(actor|ppo|refuel|train).*|dpo|pairs|models|step-.*")  # folders that say little by their own name
TRAIN, TRAINING = "per_device_train_batch_size", "per_device_training_batch_size"
GENERATION, GLOBAL = "per_device_generation_batch_size", "global_batch_size"
SAMPLES = "samples_per_prompt"
MOST_NAMED = 128  # GPUs named in a message


def preset_names(command: str) -> list[str]:
    """Names of the presets of a subcommand."""
    return sorted(file.stem for file in (PRESETS / command).glob("*.yaml") if not file.stem.startswith("_"))


def find_preset(command: str, name: str) -> Path | None:
    """The file of a preset by its name, with or without suffix."""
    file = PRESETS / command / f"{name.removesuffix('.yaml').removesuffix('.sh')}.yaml"
    return file if file.is_file() and Path(name).name == name else None


def variables(preset: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """What a preset's values may name."""
    project = environ.get("PROJ_PATH") or os.getcwd()
    usual_data = str(preset["data"]).replace("${PROJ_PATH}", project)
    usual_model = str(preset["model"])
    data_name, _, model_name = str(preset["run"]).partition("-")
    data, model = environ.get("DATA") or usual_data, environ.get("MODEL") or usual_model
    if data != usual_data:
        data_name = _short_name(data)
    if model != usual_model:
        model_name = _short_name(model).removeprefix(f"{data_name}-")
    models = Path(project) / "models"
    run = models / "-".join(filter(None, (data_name, model_name)))
    reward_model = environ.get("REWARD_MODEL") or str(preset.get("reward_model", run / "reward"))
    model = str(run / STEP_1) if model == STEP_1 else model
    return {"PROJ_PATH": project, "MODEL": model, "DATA": data, "REWARD_MODEL": reward_model, "RUN": str(run)}


def batch_sizes(most: Mapping[str, int], given: Mapping[str, int], processes: int) -> dict[str, int]:
    """Batch sizes of a preset by flag, for a number of processes.

    The largest sizes up to the most that divide a process's share; in step 3 a rollout holds one update's responses,
    and a prompt has all of its --samples_per_prompt on one process.

    Args:
        most: the most examples (of step 3: responses) of a process, by flag.
        given: what the user chose instead, by flag, the global batch with it.
        processes: how many share the global batch.

    Raises:
        UserError: they cannot share it evenly.
    """
    batch, samples = given.get(GLOBAL, 0), given.get(SAMPLES) or 1
    if min(batch, samples, processes) < 1:  # the flags' own rules refuse them
        return {}
    if batch % (processes * samples):
        raise _uneven(batch, samples, processes)
    share = batch // processes
    sizes = {name: largest_part(share, most[name]) for name in (TRAIN, TRAINING) if name in most}
    if GENERATION in most:
        prompts = share // samples
        sizes[GENERATION] = largest_part(prompts, max(1, most[GENERATION] // samples))
        sizes["generation_batches"] = max(1, prompts // (given.get(GENERATION) or sizes[GENERATION]))
    return sizes


def _uneven(batch: int, samples: int, processes: int) -> UserError:
    """The global batch has no equal shares of whole prompts."""
    whole, together = processes * samples, f", {samples} responses of a prompt together" if samples > 1 else ""
    sizes = ", ".join(str(number) for number in range(1, MOST_NAMED + 1) if batch % (number * samples) == 0)
    fewer = f"give --num_gpus (NUM_GPUS) so that the number of GPUs is one of {sizes}, or " if sizes else ""
    return UserError(
        f"{processes} GPUs cannot share the global batch of {batch} evenly{together}: {fewer}add"
        f" --global_batch_size {batch // whole * whole or whole} or another multiple of {whole}."
    )


def _short_name(path: str) -> str:
    """The last part of a path, without the suffix of a data file; where that says little, the one before, too."""
    path = path.rstrip("/").removesuffix("/sft").removesuffix(".gz")
    folder, _, name = path.rpartition("/")
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    if VAGUE.fullmatch(name) and folder:
        name = f"{_short_name(folder)}-{name}"
    return re.sub(r"[^\w.-]", "-", name)
