# SPDX-License-Identifier: Apache-2.0
"""Scores from a reward model that reads the sampled ids; one with its own tokenizer: reward_texts.py."""

from __future__ import annotations

import logging
from itertools import accumulate

import torch
from torch import Tensor

from dschat.models.engines import Scalar
from dschat.models.layout import PassSize, layouts
from dschat.run.distributed import largest_over_ranks
from dschat.scoring.source import ResponseTexts, Scores, with_segments
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
