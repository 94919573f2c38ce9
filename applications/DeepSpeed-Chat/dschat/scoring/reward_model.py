# SPDX-License-Identifier: Apache-2.0
"""Scores from a reward model, which reads sampled ids or, with its own tokenizer, texts or whole dialogues."""

from __future__ import annotations

import logging
from itertools import accumulate

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.models.engines import Scalar
from dschat.models.layout import PassSize, layouts
from dschat.run.distributed import largest_over_ranks
from dschat.scoring.reward_reader import RewardReader
from dschat.scoring.source import ResponseTexts, Scores, prefix_texts, with_segments
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)


class RewardModelScores:
    """The reward model's number at the last response token (the last prompt token of an empty response)."""

    def __init__(self, model: Scalar, batch_size: int, max_tokens: int | None = None) -> None:
        """Takes a model, and the size of a forward pass, see `PassSize`."""
        self.model = model
        self._size = PassSize(batch_size, max_tokens)

    @torch.no_grad()
    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor | Scores:
        """The scores; with segments, also the numbers at the last token of each macro action."""
        scores = torch.zeros(len(rollout.input_ids), device=rollout.input_ids.device)
        token_numbers = torch.zeros(rollout.response_mask.shape, device=scores.device)
        for layout in layouts(rollout, self._size, largest_over_ranks):
            outputs = self.model(layout.input_ids, None)
            scores[layout.rows] = layout.last(outputs)
            if texts.segments is not None:
                token_numbers[layout.rows, : layout.width] = layout.at(outputs)
        if texts.segments is None:
            return scores
        segment_numbers: list[list[float]] = []
        for row_numbers, lengths in zip(token_numbers.tolist(), texts.segments.lengths, strict=True):
            segment_numbers.append([row_numbers[end - 1] for end in accumulate(lengths)])
        return with_segments(segment_numbers, texts, scores.device, "the reward model")


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
