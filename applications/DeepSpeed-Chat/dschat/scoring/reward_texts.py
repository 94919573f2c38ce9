# SPDX-License-Identifier: Apache-2.0
"""Scores of step 3 from a reward model with its own tokenizer, which reads the texts of prompts and responses.

`RewardReader` makes the model's input of them. A text that is too long for the model ends the run or has no score.
"""

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
    """One number for each text, also where a response is scored macro action by macro action (--segment_rewards)."""

    model: None = None  # the self-check has nothing to compare: the model does not read the rollout's ids

    def __init__(self, reader: RewardReader, skips: bool = False) -> None:
        """Takes a reader. With `skips`, a text that is too long has no score (NaN); otherwise the run stops."""
        self._reader = reader
        self._skips = skips

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        """Scores (B,) float32; with segments, also those of each response up to the end of every macro action.

        Raises:
            UserError: a text is longer than the model reads, unless such texts are skipped; or the model's chat
                template refuses a row.
        """
        device = rollout.input_ids.device
        if texts.segments is None:
            return self._scores(texts).to(device)
        prefixes = prefix_texts(texts)
        count = len(prefixes.responses)
        scores = self._scores(prefixes, padding=largest_over_ranks(count) - count)
        segment_counts = [len(lengths) for lengths in texts.segments.lengths]
        numbers = [row_scores.tolist() for row_scores in scores.split(segment_counts)]
        return with_segments(numbers, texts, device, "the reward model")

    def _scores(self, texts: ResponseTexts, padding: int = 0) -> Tensor:
        """Scores of n texts, (n,) float32 on the CPU.

        The model also reads `padding` copies of the first text, so that all ranks read equally many.
        """
        count = len(texts.responses)
        scores, problems = self._reader.read(texts.repeated(padding))
        too_long = {row: problem for row, problem in problems.items() if row < count}
        if not too_long:
            return scores[:count]
        first_problem = next(iter(too_long.values()))
        if not self._skips:
            raise UserError(first_problem)
        scores[list(too_long)] = torch.nan
        logger.warning("%s Texts without a score: %d of %d.", first_problem, len(too_long), count)
        return scores[:count]
