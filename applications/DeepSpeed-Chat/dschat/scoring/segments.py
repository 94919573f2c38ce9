# SPDX-License-Identifier: Apache-2.0
"""Scores of macro actions (--segment_rewards): what a source is asked, and how its numbers become rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.encoding import decode_response

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
        One number for a response is its score, and no macro action has a reward of its own.

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
        return scores.float(), torch.where(scores.isfinite()[:, None], rewards, 0.0).float()


def is_finite(numbers: Numbers) -> bool:
    """Whether all of a response's numbers are."""
    return all(map(math.isfinite, numbers if isinstance(numbers, Sequence) else [numbers]))


def segments_of(
    tokenizer: PreTrainedTokenizerBase,
    responses: Sequence[str],
    ids: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    of_prefixes: bool,
) -> Segments:
    """Cuts B responses into the texts of their macro actions, of so many tokens each.

    A character that a macro action begins and the next one ends belongs to the next; the last one has the rest.
    """
    texts = []
    for response, row, of_row in zip(responses, ids, lengths, strict=True):
        places = [0]
        for end in list(accumulate(of_row))[:-1]:
            said = decode_response(tokenizer, row[:end]).rstrip("\ufffd")
            places.append(min(max(len(said), places[-1]), len(response)))
        texts.append([response[a:b] for a, b in zip(places, [*places[1:], len(response)], strict=True)])
    return Segments(texts, [list(of_row) for of_row in lengths], of_prefixes)
