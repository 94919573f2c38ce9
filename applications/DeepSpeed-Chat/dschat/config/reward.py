# SPDX-License-Identifier: Apache-2.0
"""Flags of step 2, the reward model."""

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal

from dschat.config import rules
from dschat.config.rules import flag
from dschat.config.supervised import SupervisedConfig

logger = logging.getLogger(__name__)

RewardLoss = Literal["end", "last_token", "per_sample", "average"]


@dataclass(kw_only=True)
class RewardConfig(SupervisedConfig):
    """Step 2: a scalar head trained on pairs of chosen and rejected responses."""

    _argument_group_name = "reward model"
    step: ClassVar[int] = 2
    sequences_per_example: ClassVar[int] = 2

    learning_rate: float = flag("peak learning rate", 1e-5)
    weight_decay: float = flag("weight decay of AdamW", 0.1)
    reward_loss: RewardLoss = flag(
        "numbers of a pair that are compared: at the last tokens (end), one token earlier (last_token), at every token"
        " from the first difference on (per_sample), or their means up to one token before the last (average)",
        "end",
    )
    margin_key: str | None = flag("column with how much the chosen response shall win by, 0 or more", None)
    center_rewards_coefficient: float = flag(
        "weight of (chosen score + rejected score)², which keeps the scores around 0", 0.0
    )
    reward_gain: bool = flag(
        "learn one factor of all scores beside the head; it goes into the head's weights when the model is saved",
        False,
    )

    def validate(self) -> None:
        """Check the shared rules, then those of the reward model. Raises UserError."""
        super().validate()
        rules.check_numbers(self, ["center_rewards_coefficient"], rules.AT_LEAST_0)
        rules.check_not_empty(self, ["margin_key"])
        if self.reward_loss in ("last_token", "average"):
            logger.warning(
                "--reward_loss %s does not train the number at the last token, which step 3 and inference read as the"
                " score: watch eval/end_accuracy, its accuracy. With end and per_sample the two are one.",
                self.reward_loss,
            )
