# SPDX-License-Identifier: Apache-2.0
"""Rewards of macro actions (--segment_rewards): texts for a source of scores, and rewards from its numbers.

`training/ppo/score.py` makes the `Segments` of a rollout, sources of scores read their texts, and
`source.py: with_segments` makes scores and rewards of the numbers that a source returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# What a source returns for a response: a single number, or one for each of its macro actions.
ResponseNumbers = float | Sequence[float]


@dataclass(frozen=True)
class Segments:
    """The macro actions of B responses, which a source scores one by one.

    Attributes:
        texts: for each response, the texts of its macro actions; joined, they are the response.
        lengths: for each response, the numbers of tokens of its macro actions.
        by_prefix: a number scores the response up to the end of the macro action, and its increase over the previous
            number is the macro action's reward; otherwise the number is the reward.
    """

    texts: list[list[str]]
    lengths: list[list[int]]
    by_prefix: bool = False

    def of_row(self, row: int) -> Segments:
        """The macro actions of a single response."""
        return Segments([self.texts[row]], [self.lengths[row]], self.by_prefix)

    def rewards(self, numbers: Sequence[ResponseNumbers]) -> tuple[Tensor, Tensor]:
        """Converts a source's numbers into scores and rewards of macro actions.

        Example: numbers 1, 3, 2 give rewards 1, 3, 2 and the score 6; of prefixes, rewards 1, 2, −1 and the score 2. A
        single number for a response is its score, and its macro actions have no rewards. A response with a number that
        is not finite has no score, NaN; one without macro actions has the score 0.

        Args:
            numbers: numbers of each response.

        Returns:
            scores (B,) and rewards (B, M) float32, on the CPU; a score is the sum of the rewards if there are any.
        """
        longest = max(map(len, self.lengths), default=0)
        scores = torch.zeros(len(numbers), dtype=torch.float64)
        rewards = torch.zeros(len(numbers), longest, dtype=torch.float64)
        for row, response_numbers in enumerate(numbers):
            if not isinstance(response_numbers, Sequence):
                scores[row] = response_numbers
                continue
            segment_rewards = torch.tensor(response_numbers, dtype=torch.float64)
            if self.by_prefix:
                segment_rewards = segment_rewards.diff(prepend=segment_rewards.new_zeros(1))
            rewards[row, : len(segment_rewards)] = segment_rewards
            scores[row] = segment_rewards.sum()
        scores = scores.float()
        rewards = rewards.float()
        is_valid = scores.isfinite() & rewards.isfinite().all(1)
        return torch.where(is_valid, scores, torch.nan), torch.where(is_valid[:, None], rewards, 0.0)


def is_finite(numbers: ResponseNumbers) -> bool:
    """Whether all numbers of a response are finite."""
    if isinstance(numbers, Sequence):
        return all(map(math.isfinite, numbers))
    return math.isfinite(numbers)
