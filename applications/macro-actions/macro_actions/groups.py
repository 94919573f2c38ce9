# SPDX-License-Identifier: Apache-2.0
"""Responses of a group, the K samples of one prompt, compared with each other; no number depends on another prompt.

All functions take scores (P, K) and counted (P, K) bool: False leaves a response out as if it had not been drawn; all
count where it is None.
"""

import torch
from torch import Tensor

EPSILON = 1e-6  # added to a standard deviation


def rloo(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """Each score minus the mean of the other scores of its prompt (Ahmadian et al. 2024, "Back to Basics").

    Example: 1, 2, 6 → 1 − 4, 2 − 3.5, 6 − 1.5.

    Returns:
        advantages (P, K): 0 where a score is left out or no other of its prompt counts.
    """
    counted = _all_if_none(counted, scores)
    scores = torch.where(counted, scores, 0.0)
    others = counted.sum(1, keepdim=True) - 1
    baseline = (scores.sum(1, keepdim=True) - scores) / others.clamp(min=1)
    return torch.where(counted & (others > 0), scores - baseline, 0.0)


def dr_grpo(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """Each score minus the mean of its prompt's (Liu et al. 2025): (1 − 1/K) of `rloo`.

    Example: 1, 2, 6 → −2, −1, 3.

    Returns:
        advantages (P, K): 0 where a score is left out or no other of its prompt counts.
    """
    counted = _all_if_none(counted, scores)
    mean, _ = moments(scores, counted)
    return torch.where(counted, scores - mean, 0.0)


def grpo(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """`dr_grpo`, divided by the standard deviation of the prompt's scores plus 1e-6 (Shao et al. 2024).

    Example: 1, 2, 6 → −2/√7, −1/√7, 3/√7. The deviation has the denominator K − 1, as in the released codes.

    Returns:
        advantages (P, K): 0 where a score is left out, no other of its prompt counts, or all are equal.
    """
    counted = _all_if_none(counted, scores)
    return dr_grpo(scores, counted) / scale(scores, counted)


def scale(scores: Tensor, counted: Tensor) -> Tensor:
    """What GRPO divides by, (P, 1): the standard deviation plus 1e-6; infinity where all scores are equal."""
    _, deviation = moments(scores, counted)
    return torch.where(are_equal(scores, counted)[:, None], torch.inf, deviation + EPSILON)


def moments(scores: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (denominator K − 1; 0 for a single score) of each prompt's, (P, 1) each."""
    count = counted.sum(1, keepdim=True)
    mean = torch.where(counted, scores, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(counted, scores - mean, 0.0).square().sum(1, keepdim=True)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def are_equal(scores: Tensor, counted: Tensor) -> Tensor:
    """(P,) bool: the prompt's scores are all the same, so that nothing can be learnt of them (Yu et al. 2025)."""
    lowest = torch.where(counted, scores, torch.inf).amin(1)
    return torch.where(counted, scores, -torch.inf).amax(1) <= lowest


def refilled(equal: Tensor, further: Tensor, ranks: int = 1) -> Tensor:
    """Which group each place holds once further groups of unequal scores have taken the places of equal ones.

    The first such places and the first such groups, whatever the number of ranks; in turn, but what a rank has drawn
    stays with it where it has a place.

    Example: places equal, not, equal, equal; of three further groups the second is equal: 4, 1, 6, 3.
    Places equal, equal, not, not; of four the first is equal: 5, 6, 2, 3, but 6, 5, 2, 3 where one of two ranks has
    places 0, 2 and groups 4, 6, and the other one the others.

    Args:
        equal: (P,) bool, the groups whose places are to be taken; see `are_equal`.
        further: (Q,) bool, the further ones that are not to be taken.
        ranks: processes that groups are dealt to in turn; P is a multiple of it.

    Returns:
        (P,) long: numbers of groups, further ones from P on. What is left over stays.
    """
    places, found = equal.nonzero().flatten().tolist(), (~further).nonzero().flatten().tolist()
    count = min(len(places), len(found))
    places, found = places[:count], [len(equal) + number for number in found[:count]]
    taken: dict[int, int] = {}
    for rank in range(ranks):
        taken |= zip(
            [place for place in places if place % ranks == rank],
            [group for group in found if group % ranks == rank],
            strict=False,
        )
    taken |= zip(
        [place for place in places if place not in taken],
        [group for group in found if group not in taken.values()],
        strict=True,
    )
    return torch.tensor([taken.get(place, place) for place in range(len(equal))], device=equal.device)


def prefix_values(ids: Tensor, scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """V of every prefix of every response: the mean score of the prompt's responses that begin with it.

    Example: responses a b, a c, d with scores 1, 3, 8: V of the empty prefix is 4, of a 2, of a b 1, of d 8.

    Args:
        ids: (P, K, R), tokens of the responses, −1 behind them.
        scores, counted: (P, K).

    Returns:
        (P, K, R + 1): in column j the value of the first j tokens; behind its end, of the whole response and what
        is equal to it.
    """
    counted = _all_if_none(counted, scores)
    totals = counts = scores.new_zeros(*ids.shape[:2], ids.shape[2] + 1)
    for k in range(ids.shape[1]):  # one at a time: all pairs of long responses would take much memory
        alike = (ids == ids[:, k : k + 1]).cumprod(2, dtype=torch.uint8)
        alike = torch.cat([torch.ones_like(alike[..., :1]), alike], 2).bool() & counted[:, k, None, None]
        totals = totals + torch.where(alike, scores[:, k, None, None], 0.0)
        counts = counts + alike
    return totals / counts.clamp(min=1)


def _all_if_none(counted: Tensor | None, scores: Tensor) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool) if counted is None else counted.bool()
