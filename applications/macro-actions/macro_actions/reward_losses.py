# SPDX-License-Identifier: Apache-2.0
"""Losses of the reward model: which of the numbers that it gives at every token of a pair are compared.

    loss        compares                                                                 scores that are reported
    end         the numbers at the last tokens, which are those that score a response    the same
    last_token  the numbers one token earlier: of the states that produce the last ones  the same
    average     means from the first difference to one token before the last             as of last_token
    per_sample  the numbers at every token from the first difference on                  as of end

Every comparison of a chosen number c with a rejected one r costs −log σ(c − r − m), with a pair's margin m.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from macro_actions.losses import Stats

RewardLoss = Literal["end", "last_token", "per_sample", "average"]
BEFORE_END: tuple[RewardLoss, ...] = ("last_token", "average")  # these leave the number at the last token as it is


@dataclass(frozen=True)
class Pairs:
    """N comparisons, padded on the right to T tokens; prompt and response together, no sequence is empty.

    Attributes:
        ids, other_ids: (N, T) long: of the chosen and of the rejected sequences.
        mask, other_mask: (N, T) bool, True on real tokens.
        margins: (N,) how much the chosen response shall win by; none when None.
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
    """Σ (loss of a pair + centering · (s + s')²) / num_pairs, where s and s' are the scores that are reported.

    The second term keeps the scores of a pair around 0 and leaves their difference alone (Eisenstein et al. 2023).
    A pair of equal sequences has nothing to compare: `per_sample` leaves it out, and it is not to be counted. With the
    other losses it is a tie, which costs log 2 and gives no gradient.

    Args:
        kind: see above.
        chosen, rejected: (N, T) the model's number at every token, differentiable.
        pairs: of the same sequences.
        centering: coefficient of the second term.
        num_pairs: the denominator; the pairs that count when None. 0, where no pair counts, gives 0.

    Returns:
        The loss (0-d), and accuracy (share of pairs with s > s'; a tie is wrong), chosen, rejected, margin (means).
        Where s is not the number at the last token: end_accuracy, the accuracy of that number. With `average`:
        mean_accuracy, that of the means.
    """
    ends, other_ends = _last(pairs.mask), _last(pairs.other_mask)
    first, differ = first_difference(pairs)
    at_end = _at(chosen, ends), _at(rejected, other_ends)
    before = _at(chosen, (ends - 1).clamp(min=0)), _at(rejected, (other_ends - 1).clamp(min=0))
    scores = before if kind in BEFORE_END else at_end
    counted = differ if kind == "per_sample" else torch.ones_like(differ)
    if kind == "per_sample":
        losses = _mean_over_tokens(chosen, rejected, pairs, first)
    elif kind == "average":
        compared = _mean_before(chosen, first, ends), _mean_before(rejected, first, other_ends)
        losses = _costs(*compared, pairs.margins)
    else:
        losses = _costs(*scores, pairs.margins)
    if centering:
        losses = losses + centering * (scores[0] + scores[1]).square()
    total = counted.sum() if num_pairs is None else torch.as_tensor(num_pairs, device=chosen.device)
    total = torch.where(total > 0, total, 1)
    with torch.no_grad():
        margin = scores[0] - scores[1]
        means = {"accuracy": margin > 0, "chosen": scores[0], "rejected": scores[1], "margin": margin}
        if kind in BEFORE_END:
            means["end_accuracy"] = at_end[0] > at_end[1]
        if kind == "average":
            means["mean_accuracy"] = compared[0] > compared[1]
        stats = {name: torch.where(counted, x, 0).sum() / total for name, x in means.items()}
    return torch.where(counted, losses, 0.0).sum() / total, stats


def first_difference(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The first place where the sequences of a pair differ, the end of one of them included.

    Returns:
        The places (N,) long, 0 where there is none; and whether there is one, (N,) bool.
    """
    differs = (pairs.ids != pairs.other_ids) | (pairs.mask != pairs.other_mask)
    differs = differs & (pairs.mask | pairs.other_mask)
    return differs.long().argmax(1), differs.any(1)


def _last(mask: Tensor) -> Tensor:
    """The last real place of rows padded on the right: (N, T) bool → (N,) long."""
    return mask.sum(1) - 1


def _at(numbers: Tensor, places: Tensor) -> Tensor:
    """(N, T), (N,) → (N,)."""
    return numbers.gather(1, places[:, None]).squeeze(1)


def _costs(chosen: Tensor, rejected: Tensor, margins: Tensor | None) -> Tensor:
    """−log σ(chosen − rejected − margin), of any shape."""
    difference = chosen - rejected
    return -F.logsigmoid(difference if margins is None else difference - margins)


def _mean_over_tokens(chosen: Tensor, rejected: Tensor, pairs: Pairs, first: Tensor) -> Tensor:
    """(N,): the mean cost over the tokens from the first difference to the end of the longer sequence.

    Behind the end of the shorter one, the number at its last token goes on: padding is no text, and what a model gives
    there depends on how its attention is computed.
    """
    width = torch.arange(chosen.shape[1], device=chosen.device)
    numbers = chosen.gather(1, torch.minimum(width, _last(pairs.mask)[:, None]))
    others = rejected.gather(1, torch.minimum(width, _last(pairs.other_mask)[:, None]))
    compared = (pairs.mask | pairs.other_mask) & (width >= first[:, None])
    margins = None if pairs.margins is None else pairs.margins[:, None]
    costs = torch.where(compared, _costs(numbers, others, margins), 0.0)
    return costs.sum(1) / compared.sum(1)


def _mean_before(numbers: Tensor, first: Tensor, ends: Tensor) -> Tensor:
    """(N,): the mean from the first difference to one token before the last; that token where nothing is between."""
    before = (ends - 1).clamp(min=0)
    width = torch.arange(numbers.shape[1], device=numbers.device)
    inside = (width >= torch.minimum(first, before)[:, None]) & (width <= before[:, None])
    return torch.where(inside, numbers, 0.0).sum(1) / inside.sum(1)
