# SPDX-License-Identifier: Apache-2.0
"""A sequence classifier with one label whose forward gives a number at every position: reward model and critic."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from dschat.models.backbone import last_hidden_state
from dschat.models.heads import keep_float32
from macro_actions.masked import last_true

logger = logging.getLogger(__name__)

KEY = "reward_loss"  # in config.json


class ScalarModel(nn.Module):
    """Reward model or critic. ``inner`` is the Hugging Face classifier, which is what gets saved."""

    output_head = None  # the score layer sees all positions at once

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.inner: Any = classifier
        keep_float32(classifier.score)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The head's output at every position, which has seen that token: (B, T) float32, meaningless where nothing is
        attended.

        `input_ids` (B, T) long are padded on either side; `attention_mask` (B, T) bool is True on real tokens, None
        where every row begins in the first column.
        """
        return self.inner.score(last_hidden_state(self.inner, input_ids, attention_mask)).squeeze(-1).float()


def last_scores(numbers: Tensor, attention_mask: Tensor) -> Tensor:
    """The number at the last attended position of each row: (B, T), (B, T) bool → (B,)."""
    return torch.where(last_true(attention_mask), numbers, 0.0).sum(1)


def note_reward_loss(model: Any, loss: str) -> None:
    """Writes the name of a loss into a classifier's config; nothing where it is `end` and always was."""
    if loss != "end" or hasattr(model.config, KEY):
        setattr(model.config, KEY, loss)


def warn_of_reward_loss(config: PreTrainedConfig, name: str) -> None:
    """Warns before scores are read at last tokens of a model that was trained elsewhere."""
    loss = getattr(config, KEY, None)
    if loss in ("last_token", "average"):
        logger.warning(
            "%s was trained with --reward_loss %s, which leaves the number at the last token as it was; the scores"
            " here are that number. Train it with end or per_sample.",
            name,
            loss,
        )
