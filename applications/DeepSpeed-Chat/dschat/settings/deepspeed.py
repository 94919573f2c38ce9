# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configuration from a run's flags and the user's own file."""

import json
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.base.jsonl import parse_json
from dschat.settings.batches import BatchPlan

# Settings that flags own, since one file serves all models of a run and their values differ. A file may leave them
# out or say "auto".
DECIDED_BY_FLAGS = {
    "optimizer": "flags (--learning_rate, --weight_decay, …)",
    "scheduler": "flags (--lr_scheduler_type, …)",
    "train_batch_size": "--global_batch_size and the batch size flags",
    "train_micro_batch_size_per_gpu": "--global_batch_size and the batch size flags",
    "gradient_accumulation_steps": "--global_batch_size and the batch size flags",
    "zero_optimization.cpu_offload": '--offload, or "offload_optimizer" in the file',
    "zero_optimization.cpu_offload_param": '"offload_param" in the file',
    "zero_optimization.stage": "--zero_stage, --actor_zero_stage or --critic_zero_stage",
    "gradient_clipping": "--gradient_clipping",
    "bf16.enabled": "--dtype",
    "fp16.enabled": "--dtype",
}
# Checked here: the merging with our values and the memory plan read them before DeepSpeed checks the file.
SECTIONS = (
    "bf16",
    "fp16",
    "data_types",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
)
LARGEST_NUMBER = 10**18  # bytes or elements, more than any machine has
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
        UserError: see `read_deepspeed_file`.
    """
    if plan.max_tokens:
        # With a token limit the number of micro-batches varies; DeepSpeed is told the maximum, one row each.
        micro_batch = 1
        accumulation = plan.update_per_rank
    else:
        micro_batch = plan.micro_batch
        accumulation = plan.accumulation
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
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
    # Without ZeRO, DeepSpeed has no float32 sums beside bf16 weights. Only frozen models are at stage 0 in bf16.
    if dtype == "bf16" and zero_stage:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if file is not None:
        _merge(config, read_deepspeed_file(file))
    return config


def read_deepspeed_file(file: str) -> dict[str, Any]:
    """The user's file.

    Raises:
        UserError: it cannot be read, holds anything but a JSON object, sets what flags decide, or holds a value of a
            wrong type that is read here or by the memory plan.
    """
    origin = f"--deepspeed_config {file}"
    try:
        content = parse_json(Path(file).read_bytes(), origin)
    except OSError as error:
        raise UserError(f"{origin}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{origin}: must hold a JSON object.")
    _check_values(content, origin)
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


def _merge(config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Write the values of a file into a configuration, section by section; "auto" changes nothing."""
    for key, value in changes.items():
        if value == "auto":
            continue
        if isinstance(value, dict) and isinstance(config.setdefault(key, {}), dict):
            _merge(config[key], value)
        else:
            config[key] = value


def _check_values(section: dict[str, Any], origin: str, prefix: str = "") -> None:
    """Raises UserError if a section sets what flags decide, or holds a value of a wrong type.

    Args:
        section: the file's content, or a part of it.
        origin: the flag and its file.
        prefix: the keys that lead to the section, with a dot after each.
    """
    for key, value in section.items():
        if value == "auto":
            continue
        name = prefix + key
        problem = None
        if name in DECIDED_BY_FLAGS:
            problem = f'is decided by {DECIDED_BY_FLAGS[name]}: remove the key, or set it to "auto".'
        elif name in SECTIONS and not isinstance(value, dict):
            problem = f"must be a JSON object, not {json.dumps(value)}."
        elif name in NUMBERS and not (type(value) in (int, float) and 0 <= value <= LARGEST_NUMBER):
            problem = f"must be a number from 0 to {LARGEST_NUMBER:.0e}, not {json.dumps(value)}."
        elif name == GRADIENT_DTYPE and value not in GRADIENT_DTYPES:
            problem = f"must be one of {', '.join(GRADIENT_DTYPES)}, not {json.dumps(value)}."
        if problem:
            raise UserError(f"{origin}: {name} {problem}")
        if isinstance(value, dict):
            _check_values(value, origin, f"{name}.")
