# SPDX-License-Identifier: Apache-2.0
"""The losses of the reward model by hand, and what they do not depend on."""

import math

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from closeness import FORMULA, assert_near, near
from macro_actions.reward_losses import Pairs, reward_loss
from rl_cases import normal

KINDS = ("end", "last_token", "per_sample", "average")
PAD = 0  # also an ordinary token below, as where a tokenizer pads with what ends a text

# token ids of a chosen and a rejected sequence
RAGGED = ([5, 6, 7, 8, 9, 2], [5, 6, 4, 2])
ONE_TOKEN = ([5, 6, 2], [5, 6, 3])  # they differ in the last token alone
PREFIX = ([5, 6], [5, 6, 7, 8, 2])  # the chosen one is a prefix of the other
OTHER_PREFIX = ([5, 6, 7, PAD], [5, 6, 7])  # and so is the rejected one, before the token that fills gaps
EQUAL = ([5, 6, 2], [5, 6, 2])
SINGLE = ([5], [6])


def cost(difference: float) -> float:
    """−log σ."""
    return math.log1p(math.exp(-difference))


def case(sequences, seed, margins=None, gap=0):
    """Pairs, and numbers with NaN at the padding."""
    chosen, rejected = ([torch.tensor(pair[side]) for pair in sequences] for side in (0, 1))
    ids = pad_sequence([*chosen, *rejected], batch_first=True, padding_value=PAD)
    ids = torch.nn.functional.pad(ids, (0, gap), value=PAD)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, sequence in enumerate([*chosen, *rejected]):
        mask[row, : len(sequence)] = True
    numbers = normal(tuple(ids.shape), seed, 2.0).masked_fill(~mask, math.nan)
    if EQUAL in sequences:  # the model reads the same and says the same
        place = sequences.index(EQUAL)
        numbers[len(sequences) + place] = numbers[place]
    numbers = numbers.requires_grad_()
    pairs = Pairs(*ids.chunk(2), *mask.chunk(2), None if margins is None else torch.tensor(margins))
    return pairs, numbers


def test_by_hand() -> None:
    """Ids a b c e against a b d f e: the first difference is at place 2. Numbers are small and whole."""
    pairs, numbers = case([([5, 6, 7, 2], [5, 6, 8, 9, 2])], 0)
    with torch.no_grad():
        numbers[0, :4] = torch.tensor([9.0, 9.0, 3.0, 1.0])
        numbers[1, :5] = torch.tensor([9.0, 9.0, 1.0, 2.0, -1.0])
    losses = {kind: reward_loss(kind, *numbers.detach().chunk(2), pairs)[0].item() for kind in KINDS}
    assert losses["end"] == near(cost(1 + 1), FORMULA)
    assert losses["last_token"] == near(cost(3 - 2), FORMULA)
    assert losses["average"] == near(cost(3 - 1.5), FORMULA)
    assert losses["per_sample"] == near((cost(3 - 1) + cost(1 - 2) + cost(1 + 1)) / 3, FORMULA)


def test_the_end_of_one_sequence_is_the_first_difference() -> None:
    """Ids a b c 0 against a b c: also where the padding has the id that is read there. The shorter one goes on."""
    pairs, numbers = case([OTHER_PREFIX], 0)
    with torch.no_grad():
        numbers[0] = torch.tensor([9.0, 9.0, 9.0, 2.0])
        numbers[1, :3] = torch.tensor([9.0, 9.0, 1.0])
    loss, _ = reward_loss("per_sample", *numbers.chunk(2), pairs)
    assert float(loss) == near(cost(2 - 1), FORMULA)
    loss.backward()  # the number at the padding is NaN
    assert bool(numbers.grad.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_does_not_depend_on_how_pairs_are_split(kind) -> None:
    """An equal pair among them, so that the pairs that count are not evenly spread."""
    sequences = [RAGGED, EQUAL, PREFIX, ONE_TOKEN, OTHER_PREFIX]
    pairs, numbers = case(sequences, 3, [0.0, 0.1, 0.2, 0.3, 0.4])
    count = 4 if kind == "per_sample" else 5
    whole, stats = reward_loss(kind, *numbers.chunk(2), pairs, 0.1, count)
    (expected,) = torch.autograd.grad(whole, numbers)
    total, sums = 0.0, dict.fromkeys(stats, 0.0)
    for rows in ([1], [0, 3], [2, 4]):
        part = Pairs(*(x[rows] for x in (pairs.ids, pairs.other_ids, pairs.mask, pairs.other_mask, pairs.margins)))
        chosen, rejected = numbers.chunk(2)
        loss, own = reward_loss(kind, chosen[rows], rejected[rows], part, 0.1, count)
        total = total + loss
        sums = {name: sums[name] + own[name] for name in sums}
    (gradient,) = torch.autograd.grad(total, numbers)
    assert_near(gradient, expected.double(), FORMULA)
    assert_near(total.detach(), whole.item(), FORMULA)
    for name in stats:
        assert_near(sums[name], float(stats[name]), FORMULA)


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0.0)])
def test_without_a_pair_that_counts_loss_and_gradient_are_0(count) -> None:
    pairs, numbers = case([EQUAL], 1)
    numbers = torch.nan_to_num(numbers.detach()).requires_grad_()
    loss, stats = reward_loss("per_sample", *numbers.chunk(2), pairs, 0.5, count)
    loss.backward()
    assert float(loss) == 0 and not bool(numbers.grad.any())
    assert all(float(value) == 0 for value in stats.values())


def test_a_tie_is_wrong_and_a_margin_is_what_a_pair_must_win_by() -> None:
    pairs, _ = case([SINGLE], 0, [2.0])
    loss, stats = reward_loss("end", torch.ones(1, 1), torch.ones(1, 1), pairs)
    assert float(stats["accuracy"]) == 0
    assert float(loss) == near(cost(-2.0), FORMULA)
    assert float(reward_loss("end", torch.ones(1, 1) + 2, torch.ones(1, 1), pairs)[0]) == pytest.approx(math.log(2))


def test_centring_pulls_the_sum_of_a_pair_to_0_and_leaves_the_difference_alone() -> None:
    """TRL's term: the coefficient times the mean of (chosen + rejected)²."""
    pairs, _ = case([SINGLE, SINGLE], 0)
    chosen = torch.tensor([[3.0], [1.0]], requires_grad=True)
    rejected = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    with_it = reward_loss("end", chosen, rejected, pairs, 0.5)[0]
    without = reward_loss("end", chosen, rejected, pairs)[0]
    term = with_it - without
    assert_near(term, 0.5 * (16 + 0) / 2, FORMULA)
    first, second = torch.autograd.grad(term, (chosen, rejected))
    assert_near(first - second, [[0.0], [0.0]], FORMULA)
