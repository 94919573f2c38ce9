# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configuration from a run's settings and the user's own file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dschat.config.batches import BatchPlan
from dschat.errors import UserError

# Keys that flags decide: a file may repeat them, not change them.
DECIDED_BY_FLAGS = {
    "train_batch_size": "--global_batch_size and the batch size flags",
    "train_micro_batch_size_per_gpu": "--global_batch_size and the batch size flags",
    "gradient_accumulation_steps": "--global_batch_size and the batch size flags",
    "zero_optimization.stage": "--zero_stage, --actor_zero_stage or --critic_zero_stage",
    "bf16.enabled": "--dtype",
    "fp16.enabled": "--dtype",
}


@dataclass(frozen=True)
class EngineSettings:
    """What DeepSpeed needs to know of a run."""

    dtype: torch.dtype
    plan: BatchPlan
    zero_stage: int = 0
    gradient_checkpointing: bool = False
    offload: bool = False
    config_file: str | None = None


def deepspeed_config(settings: EngineSettings, gradient_clipping: float) -> dict[str, Any]:
    """DeepSpeed's configuration. A file's sections are merged into ours, key by key; "auto" means ours.

    Args:
        gradient_clipping: largest gradient norm; 0 = no clipping.

    Raises:
        UserError: the file cannot be read, or contradicts a flag.
    """
    plan = settings.plan
    # Cut by tokens, an update may have as many micro-batches as rows, see `Engine.begin_update`.
    micro_batch, accumulation = (1, plan.update_per_rank) if plan.max_tokens else (plan.micro_batch, plan.accumulation)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": plan.global_batch,
        "zero_optimization": _zero_optimization(settings),
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": gradient_clipping,
        "bf16": {"enabled": settings.dtype == torch.bfloat16},
        "fp16": {"enabled": settings.dtype == torch.float16},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    if settings.dtype == torch.bfloat16 and settings.zero_stage:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if settings.config_file is None:
        return config
    try:
        given = json.loads(Path(settings.config_file).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"--deepspeed_config {settings.config_file}: cannot be read as JSON: {error}") from error
    if not isinstance(given, dict):
        raise UserError(f"--deepspeed_config {settings.config_file}: must hold a JSON object.")
    for section in ("optimizer", "scheduler"):
        if given.pop(section, "auto") != "auto":
            raise UserError(
                f"--deepspeed_config {settings.config_file}: {section} is set by flags here (--learning_rate, "
                "--weight_decay, --lr_scheduler_type, …): remove the section."
            )
    _merge(config, given, settings.config_file)
    return config


def _zero_optimization(settings: EngineSettings) -> dict[str, Any]:
    """The ZeRO section. Offload moves optimiser states to CPU memory, at stage 3 the parameters, too."""
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    target = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if settings.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 10_000  # smaller parameters stay whole on every rank
        if settings.offload:
            zero["offload_param"] = target
    if settings.offload:
        zero["offload_optimizer"] = target
    return zero


def _merge(config: dict[str, Any], given: dict[str, Any], file: str, prefix: str = "") -> None:
    """Writes ``given`` into ``config``, section by section."""
    for key, value in given.items():
        name = prefix + key
        if value == "auto":
            continue
        if isinstance(value, dict) and isinstance(config.get(key, {}), dict):
            _merge(config.setdefault(key, {}), value, file, f"{name}.")
        elif name in DECIDED_BY_FLAGS and value != config[key]:
            raise UserError(
                f"--deepspeed_config {file}: {name} is {value}, but the flags give {config[key]}. "
                f'Remove the key, or set it to "auto", and use {DECIDED_BY_FLAGS[name]}.'
            )
        else:
            config[key] = value
