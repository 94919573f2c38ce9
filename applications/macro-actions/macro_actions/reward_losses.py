# SPDX-License-Identifier: Apache-2.0
"""Losses of the reward model: which of the numbers that it gives at every token of a pair are compared.

    loss         numbers that are compared                                   reported score of a sequence
    end          at the last token, which is the score of a response         at the last token
    last_token   at the token before the last                                at the token before the last
    average      mean from the first difference to the token before the last at the token before the last
    per_sample   at every token from the first difference on                 at the last token

Every comparison of a chosen number c with a rejected number r costs −log σ(c − r − m), with the margin m of the pair.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from macro_actions.losses import Stats

RewardLoss = Literal["end", "last_token", "per_sample", "average"]
BEFORE_END: tuple[RewardLoss, ...] = ("last_token", "average")  # these do not train the number at the last token


@dataclass(frozen=True)
class Pairs:
    """N comparisons of sequences (prompt and response together), padded on the right to T tokens; none is empty.

    Attributes:
        ids: shape ``(N, T)``, int64, the chosen sequences.
        other_ids: shape ``(N, T)``, int64, the rejected sequences.
        mask: shape ``(N, T)``, bool, True on tokens of the chosen sequences.
        other_mask: shape ``(N, T)``, bool, True on tokens of the rejected sequences.
        margins: shape ``(N,)``, by how much the chosen response should win; 0 with ``None``.
    """

    ids: Tensor
    other_ids: Tensor
    mask: Tensor
    other_mask: Tensor
    margins: Tensor | None = None


def reward_loss(
    kind: RewardLoss,
    chosen: Tensor,
    rejected: Tensor,
    pairs: Pairs,
    centering: float = 0.0,
    num_pairs: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """Σ (loss of a pair + centering · (s + s')²) / num_pairs, with s and s' the reported scores of the two sequences.

    The second term keeps the scores of a pair near 0 and leaves their difference alone (Eisenstein et al. 2023). A
    pair of equal sequences has nothing to compare: ``per_sample`` leaves it out, and the caller does not count it
    either. The other losses treat it as a tie, which costs log 2 and gives no gradient.

    Args:
        kind: see the table above.
        chosen: shape ``(N, T)``, the model's number at every token of the chosen sequences, differentiable.
        rejected: shape ``(N, T)``, of the rejected sequences.
        pairs: the sequences.
        centering: coefficient of the second term.
        num_pairs: denominator; the pairs that count with ``None``. 0, if no pair counts, gives a loss of 0.

    Returns:
        The loss (0-d), and the statistics accuracy (share of pairs with s > s'; a tie is wrong), chosen, rejected and
        margin (means of s, s' and s − s'). Where s is not the number at the last token, end_accuracy is the accuracy
        of that number; for ``average``, mean_accuracy is that of the means.
    """
    ends = _last_positions(pairs.mask)
    other_ends = _last_positions(pairs.other_mask)
    first, differ = first_difference(pairs)

    # Reported scores.
    end_scores = _at(chosen, ends)
    other_end_scores = _at(rejected, other_ends)
    scores = end_scores
    other_scores = other_end_scores
    if kind in BEFORE_END:
        scores = _at(chosen, (ends - 1).clamp(min=0))
        other_scores = _at(rejected, (other_ends - 1).clamp(min=0))

    # Cost of the numbers that this loss compares.
    counted = torch.ones_like(differ)
    if kind == "per_sample":
        counted = differ
        losses = _mean_over_tokens(chosen, rejected, pairs, first)
    elif kind == "average":
        means = _mean_before(chosen, first, ends)
        other_means = _mean_before(rejected, first, other_ends)
        losses = _costs(means, other_means, pairs.margins)
    else:
        losses = _costs(scores, other_scores, pairs.margins)
    if centering:
        losses = losses + centering * (scores + other_scores).square()

    # Denominator of the loss and of all statistics.
    if num_pairs is None:
        total = counted.sum()
    else:
        total = torch.as_tensor(num_pairs, device=chosen.device)
    total = torch.where(total > 0, total, 1)

    with torch.no_grad():
        numbers = {
            "accuracy": scores > other_scores,
            "chosen": scores,
            "rejected": other_scores,
            "margin": scores - other_scores,
        }
        if kind in BEFORE_END:
            numbers["end_accuracy"] = end_scores > other_end_scores
        if kind == "average":
            numbers["mean_accuracy"] = means > other_means
        stats = {}
        for name, x in numbers.items():
            stats[name] = torch.where(counted, x, 0).sum() / total
    return torch.where(counted, losses, 0.0).sum() / total, stats


def first_difference(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """First position at which the sequences of a pair differ; the end of one of them is a difference.

    Returns:
        The positions, shape ``(N,)``, int64, 0 for equal sequences; and whether the sequences differ, shape ``(N,)``,
        bool.
    """
    other_token = pairs.ids != pairs.other_ids
    one_has_ended = pairs.mask != pairs.other_mask
    differs = (other_token | one_has_ended) & (pairs.mask | pairs.other_mask)
    return differs.long().argmax(1), differs.any(1)


def _last_positions(mask: Tensor) -> Tensor:
    """Last position of rows padded on the right: (N, T) bool → (N,) int64."""
    return mask.sum(1) - 1


def _at(numbers: Tensor, positions: Tensor) -> Tensor:
    """Each row's number at a position: (N, T), (N,) → (N,)."""
    return numbers.gather(1, positions[:, None]).squeeze(1)


def _costs(chosen: Tensor, rejected: Tensor, margins: Tensor | None) -> Tensor:
    """−log σ(chosen − rejected − margin), any shape."""
    difference = chosen - rejected
    if margins is not None:
        difference = difference - margins
    return -F.logsigmoid(difference)


def _mean_over_tokens(chosen: Tensor, rejected: Tensor, pairs: Pairs, first: Tensor) -> Tensor:
    """Mean cost over the tokens from the first difference to the end of the longer sequence. Shape (N,).

    After the end of the shorter sequence, the number at its last token is compared: what a model computes on padding
    depends on how its attention is implemented.
    """
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    until_end = torch.minimum(columns, _last_positions(pairs.mask)[:, None])
    until_other_end = torch.minimum(columns, _last_positions(pairs.other_mask)[:, None])
    numbers = chosen.gather(1, until_end)
    other_numbers = rejected.gather(1, until_other_end)

    compared = (pairs.mask | pairs.other_mask) & (columns >= first[:, None])
    margins = None if pairs.margins is None else pairs.margins[:, None]
    costs = torch.where(compared, _costs(numbers, other_numbers, margins), 0.0)
    return costs.sum(1) / compared.sum(1)


def _mean_before(numbers: Tensor, first: Tensor, ends: Tensor) -> Tensor:
    """Mean from the first difference to the token before the last; that token alone if there is none between. (N,)."""
    last = (ends - 1).clamp(min=0)
    start = torch.minimum(first, last)
    columns = torch.arange(numbers.shape[1], device=numbers.device)
    inside = (columns >= start[:, None]) & (columns <= last[:, None])
    return torch.where(inside, numbers, 0.0).sum(1) / inside.sum(1)
