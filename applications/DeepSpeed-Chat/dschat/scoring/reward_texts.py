# SPDX-License-Identifier: Apache-2.0
"""Scores from a reward model with its own tokenizer, which reads the texts of prompts and responses."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.run.distributed import largest_over_ranks
from dschat.scoring.reward_reader import RewardReader
from dschat.scoring.source import ResponseTexts, Scores, prefix_texts, with_segments
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)


class TextRewardScores:
    """The score of a reward model with its own tokenizer, which reads the texts of prompts and responses."""

    model: None = None  # the self-check has nothing to compare: the model does not read the rollout's ids

    def __init__(self, reader: RewardReader, skips: bool = False) -> None:
        """Takes a reader. With `skips`, a text that is too long has no score (NaN); otherwise the run stops."""
        self._reader = reader
        self._skips = skips

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        """The scores; with segments, also those of each response up to the end of every macro action."""
        device = rollout.input_ids.device
        if texts.segments is None:
            return self._scores(texts).to(device)
        prefixes = prefix_texts(texts)
        count = len(prefixes.responses)
        padding = largest_over_ranks(count) - count  # all ranks must read equally many
        scores = self._scores(prefixes.repeated(padding))
        segment_counts = [len(lengths) for lengths in texts.segments.lengths]
        numbers = [row_scores.tolist() for row_scores in scores[:count].split(segment_counts)]
        return with_segments(numbers, texts, device, "the reward model")

    def _scores(self, texts: ResponseTexts) -> Tensor:
        scores, too_long = self._reader.read(texts)
        for row, problem in too_long.items():
            if not self._skips:
                raise UserError(problem)
            scores[row] = torch.nan
        if too_long:
            first_problem = next(iter(too_long.values()))
            logger.warning("%s Texts without a score: %d of %d.", first_problem, len(too_long), len(scores))
        return scores
