# SPDX-License-Identifier: Apache-2.0
"""Scores of macro actions (--segment_rewards): what a source is asked, and how its numbers become rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Of a response: one number, or one for each of its macro actions.
Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Segments:
    """The macro actions of B responses, of which a source of scores is asked one by one.

    Attributes:
        texts: of each response, what its macro actions say; together they are the response.
        lengths: of each response, the tokens of its macro actions.
        of_prefixes: a number is that of the response up to the end of the macro action, and what it adds to the one
            before is the macro action's reward; else the number is the reward.
    """

    texts: list[list[str]]
    lengths: list[list[int]]
    of_prefixes: bool = False

    def of_row(self, row: int) -> Segments:
        """Those of one response."""
        return Segments([self.texts[row]], [self.lengths[row]], self.of_prefixes)

    def rewards(self, numbers: Sequence[Numbers]) -> tuple[Tensor, Tensor]:
        """From what a source says of each response to its score and the rewards of its macro actions.

        Example: numbers 1, 3, 2 are rewards 1, 3, 2 and a score of 6; of prefixes, rewards 1, 2, −1 and a score of 2.
        One number for a response is its score, and no macro action has a reward of its own. A response of which a
        number is not finite has no score: NaN.

        Returns:
            scores (B,) and rewards (B, M) float32, on the CPU; a score is the sum of the rewards where there are any.
        """
        scores = torch.zeros(len(numbers), dtype=torch.float64)
        rewards = torch.zeros(len(numbers), max(map(len, self.lengths), default=0), dtype=torch.float64)
        for row, found in enumerate(numbers):
            if isinstance(found, Sequence):
                own = torch.tensor(found, dtype=torch.float64)
                rewards[row, : len(own)] = own.diff(prepend=own.new_zeros(1)) if self.of_prefixes else own
                scores[row] = own[-1] if self.of_prefixes else own.sum()
            else:
                scores[row] = found
        scores, rewards = scores.float(), rewards.float()
        bad = ~(scores.isfinite() & rewards.isfinite().all(1))
        return torch.where(bad, torch.nan, scores), torch.where(bad[:, None], 0.0, rewards)


def is_finite(numbers: Numbers) -> bool:
    """Whether all of a response's numbers are."""
    return all(map(math.isfinite, numbers if isinstance(numbers, Sequence) else [numbers]))
