# SPDX-License-Identifier: Apache-2.0
"""Flags of step 2 as direct preference optimisation."""

from dataclasses import dataclass
from typing import ClassVar

from dschat.config import rules
from dschat.config.rules import flag
from dschat.config.supervised import SupervisedConfig


@dataclass(kw_only=True)
class DPOConfig(SupervisedConfig):
    """Step 2 without a reward model: the policy itself is trained on the pairs."""

    _argument_group_name = "direct preference optimisation"
    step: ClassVar[int] = 2
    sequences_per_example: ClassVar[int] = 2

    learning_rate: float = flag("peak learning rate", 5e-7)
    weight_decay: float = flag("weight decay of AdamW", 0.1)
    beta: float = flag("how close the policy stays to the one before training; a small one lets it go further", 0.1)
    label_smoothing: float = flag("probability that a pair's label is wrong (conservative DPO)", 0.0)
    reference_free: bool = flag("compare log-probs themselves, not with those of the policy before training", False)

    def validate(self) -> None:
        """Check the shared rules, then those of DPO. Raises UserError."""
        super().validate()
        below_half = (lambda number: 0 <= number < 0.5, "a number of at least 0 and below 0.5")
        rules.check_numbers(self, ["beta"], rules.ABOVE_0)
        rules.check_numbers(self, ["label_smoothing"], below_half)
