# SPDX-License-Identifier: Apache-2.0
"""Flags of step 2, the reward model."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.config.rules import flag
from dschat.config.supervised import SupervisedConfig


@dataclass(kw_only=True)
class RewardConfig(SupervisedConfig):
    """Step 2: a scalar head trained on pairs of chosen and rejected responses."""

    step: ClassVar[int] = 2
    sequences_per_example: ClassVar[int] = 2

    learning_rate: float = flag("highest learning rate", 1e-5)
    weight_decay: float = flag("weight decay of AdamW", 0.1)
