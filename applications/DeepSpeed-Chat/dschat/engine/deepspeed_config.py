# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed needs to know of a run."""

from dataclasses import dataclass
from typing import Any

import torch

from dschat.models.opening import NAMES
from dschat.settings.batches import BatchPlan
from dschat.settings.deepspeed import deepspeed_settings


@dataclass(frozen=True)
class EngineSettings:
    """What DeepSpeed needs to know of a run."""

    dtype: torch.dtype
    plan: BatchPlan
    zero_stage: int = 0
    gradient_checkpointing: bool = False
    compile: bool = False  # decoder layers, see `dschat.models.compiled`
    checkpoint_every: int = 1  # of every so many layers the first is recomputed, where any are
    offload: bool = False
    config_file: str | None = None


def deepspeed_config(settings: EngineSettings, gradient_clipping: float) -> dict[str, Any]:
    """See `deepspeed_settings`."""
    sizes = settings.plan, NAMES[settings.dtype], settings.zero_stage, settings.offload
    return deepspeed_settings(*sizes, settings.config_file, gradient_clipping, torch.cuda.is_available())
