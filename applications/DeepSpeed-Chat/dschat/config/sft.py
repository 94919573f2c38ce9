# SPDX-License-Identifier: Apache-2.0
"""Flags of step 1, supervised fine-tuning."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.config import rules
from dschat.config.rules import flag
from dschat.config.supervised import SupervisedConfig
from dschat.errors import UserError

TrainOn = Literal["all", "last"]


@dataclass(kw_only=True)
class SFTConfig(SupervisedConfig):
    """Step 1: cross-entropy on the response tokens of demonstrations."""

    _argument_group_name = "supervised fine-tuning"
    step: ClassVar[int] = 1

    learning_rate: float = flag("peak learning rate", 2e-5)
    weight_decay: float = flag("weight decay of AdamW", 0.01)
    sft_on_prompt: bool = flag("train on the prompt tokens too", False)
    label_smoothing: float = flag("weight of all tokens alike in the targets of training, from 0 to below 1", 0.0)
    train_on: TrainOn = flag("turns of the assistant in a conversation that are trained on: all, or the last", "last")

    packing: bool = flag(
        "put several examples into a row of max_seq_len tokens; they do not see each other, and batch sizes go on to"
        " count examples",
        False,
    )

    @property
    def spreads_lengths(self) -> bool:
        """Whether a micro-batch holds examples of all lengths: packed, they leave no room."""
        return self.packing

    def validate(self) -> None:
        """Check the shared rules, then those of step 1. Raises UserError."""
        super().validate()
        below_1 = (lambda number: 0 <= number < 1, "a number of at least 0 and below 1")
        rules.check_numbers(self, ["label_smoothing"], below_1)
        if self.sft_on_prompt and self.train_on == "all":
            raise UserError("--train_on all: --sft_on_prompt trains on every token anyway; leave one of the two out.")
        if self.packing and self.attn_implementation == "flash_attention_2":
            raise UserError("--packing works with --attn_implementation sdpa and eager: give one of them.")
