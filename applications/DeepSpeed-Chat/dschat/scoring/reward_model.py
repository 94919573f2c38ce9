# SPDX-License-Identifier: Apache-2.0
"""Scores from a reward model, which reads the sampled ids or, with a tokenizer of its own, the texts."""

import logging
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.models.engines import Scalar
from dschat.models.layout import layouts
from dschat.rl.types import Rollout
from dschat.scoring.reward_reader import RewardReader
from dschat.scoring.source import ResponseTexts

logger = logging.getLogger(__name__)


class RewardModelScores:
    """The reward model's number at the last response token (the last prompt token of an empty response)."""

    def __init__(self, model: Scalar, batch_size: int) -> None:
        self.model, self._batch_size = model, batch_size

    @torch.no_grad()
    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        scores = torch.zeros(len(rollout.input_ids), device=rollout.input_ids.device)
        for rows in layouts(rollout, self._batch_size):
            scores[rows.rows] = rows.last(self.model(rows.input_ids, None))
        return scores


class TextRewardScores:
    """The number of a reward model with a tokenizer of its own, which reads the texts of prompts and responses."""

    model: None = None  # the self-check has nothing to compare: the model does not read the rollout's ids

    def __init__(self, reader: RewardReader, skips: bool = False) -> None:
        """Takes what reads. With `skips`, a text that is too long for it has no number (NaN), else the run stops."""
        self._reader, self._skips = reader, skips

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        rows = readable_rows(self._reader.tokenizer, texts)
        scores, too_long = self._reader.read(rows, texts.responses, rollout.finished.tolist())
        for row, problem in too_long.items():
            if not self._skips:
                raise UserError(problem)
            scores[row] = torch.nan
        if too_long:
            logger.warning("%s It has no score, nor have %d others.", next(iter(too_long.values())), len(too_long) - 1)
        return scores.to(rollout.input_ids.device)


def readable_rows(tokenizer: PreTrainedTokenizerBase, texts: ResponseTexts) -> list[Row]:
    """The rows as a tokenizer can read them: without a chat template it gets conversations as the actor reads them."""
    if tokenizer.chat_template is not None:
        return texts.rows
    return [
        row if row.messages is None else replace(row, prompt=prompt, messages=None)
        for row, prompt in zip(texts.rows, texts.prompts, strict=True)
    ]
