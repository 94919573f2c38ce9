# SPDX-License-Identifier: Apache-2.0
"""The loss that a reward model was trained with, in its config.json: not every one trains the last token's number."""

import logging
from typing import Any

from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

KEY = "reward_loss"  # in config.json


def note_reward_loss(model: Any, loss: str, default: str = "end") -> None:
    """Writes the name of a loss into a classifier's config; nothing where it is the default and always was."""
    if loss != default or hasattr(model.config, KEY):
        setattr(model.config, KEY, loss)


def warn_of_reward_loss(config: PreTrainedConfig, name: str) -> None:
    """Warns before scores are read at last tokens of a model that was trained elsewhere.

    Args:
        config: of a reward model.
        name: of the model, for the message.
    """
    loss = getattr(config, KEY, None)
    if loss in ("last_token", "average"):
        logger.warning(
            "%s was trained with --reward_loss %s, which leaves the number at the last token as it was; the scores"
            " here are that number. Train it with end or per_sample.",
            name,
            loss,
        )
