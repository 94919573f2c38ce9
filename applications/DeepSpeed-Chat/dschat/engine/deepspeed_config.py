# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed config of one model's engine, from the engine's settings and the user's own file."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig

from dschat.base.errors import UserError
from dschat.models.opening import DTYPE_NAMES
from dschat.run.distributed import device
from dschat.settings.batches import BatchPlan
from dschat.settings.deepspeed import deepspeed_settings


@dataclass(frozen=True)
class EngineSettings:
    """Dtype, batch sizes and memory options of the DeepSpeed engine of one model."""

    dtype: torch.dtype  # dtype of the parameters
    plan: BatchPlan  # batch sizes
    zero_stage: int = 0
    gradient_checkpointing: bool = False
    compile: bool = False  # compile decoder layers, see `dschat.models.compiled`
    gradient_checkpointing_every: int = 1  # with gradient checkpointing, recompute only the first of every N layers
    offload: bool = False  # keep optimiser states, and at stage 3 the parameters, in CPU memory
    config_file: str | None = None  # --deepspeed_config


def deepspeed_config(settings: EngineSettings, gradient_clipping: float) -> dict[str, Any]:
    """The config for DeepSpeed, with the user's file merged into it.

    Args:
        settings: settings of the engine.
        gradient_clipping: largest gradient norm; 0 = no clipping.

    Raises:
        UserError: see `read_deepspeed_file`; or DeepSpeed refuses what the file changes.
    """
    config = deepspeed_settings(
        plan=settings.plan,
        dtype=DTYPE_NAMES[settings.dtype],
        zero_stage=settings.zero_stage,
        offload=settings.offload,
        file=settings.config_file,
        gradient_clipping=gradient_clipping,
        pin_memory=device().type == "cuda",
    )
    if settings.config_file is not None:
        _check_accepted(config, settings.config_file)
    return config


def _check_accepted(config: dict[str, Any], file: str) -> None:
    """Raises UserError if DeepSpeed refuses a configuration into which the user's file was merged.

    DeepSpeed checks few types. A value of a wrong type surfaces as an arbitrary exception, so that all are caught.
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
    """Whether DeepSpeed keeps the optimiser states outside of the GPU.

    It never does so at stage 0, where no ZeRO optimiser is created that would move them.
    """
    zero = config["zero_optimization"]
    device_name = zero.get("offload_optimizer", {}).get("device", "none")
    return bool(zero["stage"] > 0 and device_name != "none")
