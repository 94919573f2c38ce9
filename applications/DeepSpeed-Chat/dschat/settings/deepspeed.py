# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configuration from a run's flags and the user's own file."""

import json
import math
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.jsonl import without_repeats
from dschat.settings.batches import BatchPlan

# Keys that flags decide: a file may repeat them, not change them.
DECIDED_BY_FLAGS = {
    "train_batch_size": "--global_batch_size and the batch size flags",
    "train_micro_batch_size_per_gpu": "--global_batch_size and the batch size flags",
    "gradient_accumulation_steps": "--global_batch_size and the batch size flags",
    "zero_optimization.stage": "--zero_stage, --actor_zero_stage or --critic_zero_stage",
    "bf16.enabled": "--dtype",
    "fp16.enabled": "--dtype",
}
# Values of a file that the memory plan reads before DeepSpeed does.
SECTIONS = ("data_types", "zero_optimization.offload_optimizer", "zero_optimization.offload_param")
NUMBERS = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.sub_group_size",
)
GRADIENT_DTYPE = "data_types.grad_accum_dtype"
GRADIENT_DTYPES = ("fp32", "bf16", "fp16")


def deepspeed_settings(
    plan: BatchPlan,
    dtype: str,
    zero_stage: int,
    offload: bool = False,
    file: str | None = None,
    gradient_clipping: float = 0.0,
    pin_memory: bool = False,
) -> dict[str, Any]:
    """DeepSpeed's configuration for one model.

    Sections of the user's file are merged into ours key by key; the value "auto" leaves ours.

    Args:
        plan: batch sizes.
        dtype: fp32, bf16 or fp16.
        zero_stage: ZeRO stage of this model.
        offload: keep optimiser states, and at stage 3 the parameters, in CPU memory.
        file: --deepspeed_config.
        gradient_clipping: largest gradient norm; 0 = no clipping.
        pin_memory: pin the offloaded memory, which needs a GPU.

    Raises:
        UserError: the file cannot be read, contradicts a flag, or holds a value of a wrong type that is read here.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "train_batch_size": plan.global_batch,
        "zero_optimization": _zero_optimization(zero_stage, offload, pin_memory),
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": gradient_clipping,
        # A gradient is added to its float32 sum at once; otherwise those of a whole micro-batch stay in memory.
        "bf16": {"enabled": dtype == "bf16", "immediate_grad_update": True},
        "fp16": {"enabled": dtype == "fp16"},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if dtype == "bf16" and zero_stage:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if file is not None:
        _merge(config, read_deepspeed_file(file), file)
    if plan.max_tokens:  # an update may have as many micro-batches as rows, see `Engine.begin_update`
        config["train_micro_batch_size_per_gpu"] = 1
        config["gradient_accumulation_steps"] = plan.update_per_rank
    return config


def read_deepspeed_file(file: str) -> dict[str, Any]:
    """The user's file, without sections that flags decide.

    Raises:
        UserError: it is missing, holds anything but a JSON object, or has a section that flags decide.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"), object_pairs_hook=without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--deepspeed_config {file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"--deepspeed_config {file}: must hold a JSON object.")
    for section in ("optimizer", "scheduler"):
        if content.pop(section, "auto") != "auto":
            raise UserError(
                f"--deepspeed_config {file}: {section} is set by flags here (--learning_rate, "
                "--weight_decay, --lr_scheduler_type, …): remove the section."
            )
    return content


def _zero_optimization(stage: int, offload: bool, pin_memory: bool) -> dict[str, Any]:
    """The ZeRO section."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 10_000  # smaller parameters stay whole on every rank
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin_memory}
    if offload and stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": pin_memory}
    return zero


def _merge(config: dict[str, Any], changes: dict[str, Any], file: str, prefix: str = "") -> None:
    """Write the sections of a file into a configuration, recursively."""
    for key, value in changes.items():
        name = prefix + key
        if value == "auto" or (value is None and name in SECTIONS):
            continue
        ours = config.get(key)
        _check_value(name, value, ours, file)
        if isinstance(value, dict) and (ours is None or isinstance(ours, dict)):
            _merge(config.setdefault(key, {}), value, file, f"{name}.")
        else:
            config[key] = value


def _check_value(name: str, value: Any, ours: Any, file: str) -> None:
    """Raises UserError if a file's value contradicts the flags or has a wrong type.

    Args:
        name: the keys that lead to it, separated by dots.
        value: the value in the file.
        ours: the value that the flags give; None if they give none.
        file: --deepspeed_config.
    """
    as_json = json.dumps(value)
    problem = None
    if (name in SECTIONS or isinstance(ours, dict)) and not isinstance(value, dict):
        problem = f"must be a JSON object, not {as_json}."
    elif name in DECIDED_BY_FLAGS and value != ours:
        problem = (
            f"is {as_json}, but the flags give {json.dumps(ours)}. "
            f'Remove the key, or set it to "auto", and use {DECIDED_BY_FLAGS[name]}.'
        )
    elif name in NUMBERS and not (type(value) in (int, float) and math.isfinite(value)):
        problem = f"must be a number, not {as_json}."
    elif name == GRADIENT_DTYPE and value not in GRADIENT_DTYPES:
        problem = f"must be one of {', '.join(GRADIENT_DTYPES)}, not {as_json}."
    if problem:
        raise UserError(f"--deepspeed_config {file}: {name} {problem}")
