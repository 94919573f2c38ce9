# SPDX-License-Identifier: Apache-2.0
"""Settings of a DeepSpeed engine, and the DeepSpeed config made from them."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig

from dschat.base.errors import UserError
from dschat.models.opening import NAMES
from dschat.run.distributed import device
from dschat.settings.batches import BatchPlan
from dschat.settings.deepspeed import deepspeed_settings


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a DeepSpeed engine."""

    dtype: torch.dtype
    plan: BatchPlan
    zero_stage: int = 0
    gradient_checkpointing: bool = False
    compile: bool = False  # compile decoder layers, see `dschat.models.compiled`
    checkpoint_every: int = 1  # with gradient checkpointing, recompute only the first of every N layers
    offload: bool = False
    config_file: str | None = None


def deepspeed_config(settings: EngineSettings, gradient_clipping: float) -> dict[str, Any]:
    """The config for DeepSpeed, see `deepspeed_settings`.

    Raises:
        UserError: see `deepspeed_settings`; or DeepSpeed refuses what the user's file changes.
    """
    config = deepspeed_settings(
        settings.plan,
        NAMES[settings.dtype],
        settings.zero_stage,
        settings.offload,
        settings.config_file,
        gradient_clipping,
        device().type == "cuda",
    )
    if settings.config_file is not None:
        _check_accepted(config, settings.config_file)
    return config


def _check_accepted(config: dict[str, Any], file: str) -> None:
    """Raises UserError if DeepSpeed refuses a configuration into which the user's file was merged.

    DeepSpeed checks few types by itself: a wrong one ends in whatever error its arithmetic meets.
    """
    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"--deepspeed_config {file}: DeepSpeed refuses these settings ({type(error).__name__}: {reason}); correct "
            "or remove them."
        ) from error


def offloads_optimizer(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed keeps the optimiser states outside of the GPU; it never does so at stage 0."""
    zero = config["zero_optimization"]
    device_name = zero.get("offload_optimizer", {}).get("device", "none")
    return bool(zero["stage"] > 0 and device_name != "none")
