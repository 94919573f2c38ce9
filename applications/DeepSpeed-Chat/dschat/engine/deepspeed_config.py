# SPDX-License-Identifier: Apache-2.0
"""Settings of a DeepSpeed engine, and the DeepSpeed config made from them."""

from dataclasses import dataclass
from typing import Any

import torch

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
    """The config for DeepSpeed, see `deepspeed_settings`."""
    return deepspeed_settings(
        settings.plan,
        NAMES[settings.dtype],
        settings.zero_stage,
        settings.offload,
        settings.config_file,
        gradient_clipping,
        device().type == "cuda",
    )
