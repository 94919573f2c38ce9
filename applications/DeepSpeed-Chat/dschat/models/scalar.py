# SPDX-License-Identifier: Apache-2.0
"""A sequence classifier whose forward returns a number at every position: reward model and critic."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from dschat.models.backbone import last_hidden_state
from dschat.models.heads import keep_float32
from dschat.models.reward_notes import LOSS_KEY
from macro_actions.masked import last_true

if TYPE_CHECKING:
    from macro_actions.value_bins import ValueBins

logger = logging.getLogger(__name__)


class ScalarModel(nn.Module):
    """Reward model or critic. ``inner`` is the Hugging Face classifier, which is saved.

    It has one label; or, with ``bins``, a label for each bin of a critic's values (--value_head hl_gauss).
    """

    output_head = None  # no layer is applied chunk by chunk, as a policy's output layer is

    def __init__(self, classifier: Any, bins: ValueBins | None = None) -> None:
        super().__init__()
        self.bins = bins
        self.inner: Any = classifier
        keep_float32(classifier.score)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, raw: bool = False) -> Tensor:
        """The score or value at every position, after that position's token was read.

        Args:
            input_ids: (B, T) long, padded on either side.
            attention_mask: (B, T) bool, True on real tokens. None if every row begins in the first column.
            raw: return the head's outputs, from which `numbers` makes values.

        Returns:
            (B, T) float32, or with bins and `raw` (B, T, K); meaningless where nothing is attended.
        """
        states = last_hidden_state(self.inner, input_ids, attention_mask)
        outputs = self.inner.score(states).squeeze(-1).float()
        return outputs if raw else self.numbers(outputs)

    def numbers(self, outputs: Tensor) -> Tensor:
        """Scores or values of the head's outputs: (…) as they are; of K bins the expectation, (…, K) → (…)."""
        return outputs if self.bins is None else self.bins.expectation(outputs)


def last_scores(numbers: Tensor, attention_mask: Tensor) -> Tensor:
    """The number at the last attended position of each row: (B, T), (B, T) bool → (B,)."""
    return torch.where(last_true(attention_mask), numbers, 0.0).sum(1)


def note_reward_loss(model: Any, loss: str) -> None:
    """Records a training loss in a classifier's config."""
    setattr(model.config, LOSS_KEY, loss)


def hint_at_untrained_values(model: Any, name: str) -> None:
    """Says that a critic starts from a model whose loss trained the value of one token of a response alone."""
    loss = getattr(model.config, LOSS_KEY, None)
    if loss in ("end", "last_token"):
        logger.info(
            "%s was trained with --reward_loss %s, which trains the value at one token of a response: the critic must"
            " learn the others. In step 2, --reward_loss per_sample trains all of them.",
            name,
            loss,
        )


def warn_of_reward_loss(config: PreTrainedConfig, name: str) -> None:
    """Warns that a model's scores at last tokens are meaningless because its training loss did not use them."""
    loss = getattr(config, LOSS_KEY, None)
    if loss in ("last_token", "average"):
        logger.warning(
            "%s was trained with --reward_loss %s, which does not train the number at the last token; the scores"
            " here are that number. Train it with --reward_loss end or per_sample.",
            name,
            loss,
        )
