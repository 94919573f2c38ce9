# SPDX-License-Identifier: Apache-2.0
"""Flags of step 1, supervised fine-tuning."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.config.rules import flag
from dschat.config.supervised import SupervisedConfig


@dataclass(kw_only=True)
class SFTConfig(SupervisedConfig):
    """Step 1: cross-entropy on the response tokens of demonstrations."""

    _argument_group_name = "supervised fine-tuning"
    step: ClassVar[int] = 1

    learning_rate: float = flag("highest learning rate", 2e-5)
    weight_decay: float = flag("weight decay of AdamW", 0.01)
    sft_on_prompt: bool = flag("train on the prompt tokens too", False)
