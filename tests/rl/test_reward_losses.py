# SPDX-License-Identifier: Apache-2.0
"""The losses of the reward model against plain Python on lists, for pairs of every shape."""

import math
from dataclasses import dataclass
from statistics import fmean

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from closeness import FORMULA, assert_near, near
from macro_actions.reward_losses import Pairs, reward_loss
from rl_cases import PROPERTY, SEEDS, normal

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


@dataclass(frozen=True)
class Scalar:
    """One pair by the definitions, on lists."""

    chosen: list[int]
    rejected: list[int]
    numbers: list[float]
    others: list[float]
    margin: float

    @property
    def first(self) -> int | None:
        """Where they differ; None if nowhere."""
        for place in range(max(len(self.chosen), len(self.rejected))):
            if self.chosen[place : place + 1] != self.rejected[place : place + 1]:
                return place
        return None

    def scores(self, kind: str) -> tuple[float, float]:
        """What is reported."""
        if kind in ("end", "per_sample"):
            return self.numbers[-1], self.others[-1]
        return self.numbers[max(0, len(self.numbers) - 2)], self.others[max(0, len(self.others) - 2)]

    def loss(self, kind: str) -> float:
        """Without centring; of a pair that counts."""
        if kind in ("end", "last_token"):
            chosen, rejected = self.scores(kind)
            return cost(chosen - rejected - self.margin)
        if kind == "average":
            return cost(self.mean(self.numbers) - self.mean(self.others) - self.margin)
        costs = []
        for place in range(self.first, max(len(self.numbers), len(self.others))):
            chosen = self.numbers[min(place, len(self.numbers) - 1)]
            rejected = self.others[min(place, len(self.others) - 1)]
            costs.append(cost(chosen - rejected - self.margin))
        return fmean(costs)

    def mean(self, numbers: list[float]) -> float:
        """From the first difference to one before the last; that one if nothing is between."""
        start = 0 if self.first is None else self.first
        between = numbers[start : len(numbers) - 1]
        return fmean(between) if between else numbers[max(0, len(numbers) - 2)]

    def counts(self, kind: str) -> bool:
        """Whether the loss has it."""
        return kind != "per_sample" or self.first is not None


def case(sequences, seed, margins=None, gap=0):
    """Pairs, numbers with NaN at the padding, and the same as scalars."""
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
    rows = [numbers[row][mask[row]].tolist() for row in range(len(ids))]
    own = margins or [0.0] * len(sequences)
    scalars = [Scalar(*sequence, rows[i], rows[len(sequences) + i], own[i]) for i, sequence in enumerate(sequences)]
    return pairs, numbers, scalars


def expected_of(kind, scalars, centering):
    """Loss and statistics by the definitions."""
    kept = [scalar for scalar in scalars if scalar.counts(kind)]
    scores = [scalar.scores(kind) for scalar in kept]
    n = max(1, len(kept))
    stats = {
        "accuracy": sum(c > r for c, r in scores) / n,
        "chosen": sum(c for c, _ in scores) / n,
        "rejected": sum(r for _, r in scores) / n,
        "margin": sum(c - r for c, r in scores) / n,
    }
    if kind in ("last_token", "average"):
        stats["end_accuracy"] = sum(s.numbers[-1] > s.others[-1] for s in kept) / n
    if kind == "average":
        stats["mean_accuracy"] = sum(s.mean(s.numbers) > s.mean(s.others) for s in kept) / n
    loss = sum(s.loss(kind) + centering * sum(s.scores(kind)) ** 2 for s in kept) / n
    return loss, stats


@PROPERTY
@given(
    sequences=st.lists(st.sampled_from([RAGGED, ONE_TOKEN, PREFIX, OTHER_PREFIX, SINGLE]), min_size=1, max_size=5),
    seed=SEEDS,
    gap=st.integers(0, 2),
    centering=st.sampled_from([0.0, 0.3]),
    margin=st.sampled_from([None, 0.0, 1.5]),
)
@example(sequences=[RAGGED, EQUAL, PREFIX], seed=0, gap=1, centering=0.3, margin=0.5)
@example(sequences=[EQUAL], seed=0, gap=0, centering=0.0, margin=None)
def test_the_losses_are_those_of_plain_python(sequences, seed, gap, centering, margin) -> None:
    margins = None if margin is None else [margin * i for i in range(len(sequences))]
    for kind in KINDS:
        pairs, numbers, scalars = case(sequences, seed, margins, gap)
        loss, stats = reward_loss(kind, *numbers.chunk(2), pairs, centering)
        expected, expected_stats = expected_of(kind, scalars, centering)
        assert_near(loss, expected, FORMULA)
        assert set(stats) == set(expected_stats)
        for name, value in expected_stats.items():
            assert_near(stats[name], value, FORMULA)
            assert not stats[name].requires_grad
        loss.backward()  # the numbers at padding are NaN
        assert bool(numbers.grad.isfinite().all()), kind


def test_by_hand() -> None:
    """Ids a b c e against a b d f e: the first difference is at place 2. Numbers are small and whole."""
    pairs, numbers, _ = case([([5, 6, 7, 2], [5, 6, 8, 9, 2])], 0)
    with torch.no_grad():
        numbers[0, :4] = torch.tensor([9.0, 9.0, 3.0, 1.0])
        numbers[1, :5] = torch.tensor([9.0, 9.0, 1.0, 2.0, -1.0])
    losses = {kind: reward_loss(kind, *numbers.detach().chunk(2), pairs)[0].item() for kind in KINDS}
    assert losses["end"] == near(cost(1 + 1), FORMULA)
    assert losses["last_token"] == near(cost(3 - 2), FORMULA)
    assert losses["average"] == near(cost(3 - 1.5), FORMULA)
    assert losses["per_sample"] == near((cost(3 - 1) + cost(1 - 2) + cost(1 + 1)) / 3, FORMULA)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_does_not_depend_on_how_pairs_are_split(kind) -> None:
    """An equal pair among them, so that the pairs that count are not evenly spread."""
    sequences = [RAGGED, EQUAL, PREFIX, ONE_TOKEN, OTHER_PREFIX]
    pairs, numbers, scalars = case(sequences, 3, [0.0, 0.1, 0.2, 0.3, 0.4])
    count = sum(scalar.counts(kind) for scalar in scalars)
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
    pairs, numbers, _ = case([EQUAL], 1)
    numbers = torch.nan_to_num(numbers.detach()).requires_grad_()
    loss, stats = reward_loss("per_sample", *numbers.chunk(2), pairs, 0.5, count)
    loss.backward()
    assert float(loss) == 0 and not bool(numbers.grad.any())
    assert all(float(value) == 0 for value in stats.values())


def test_a_tie_is_wrong_and_a_margin_is_what_a_pair_must_win_by() -> None:
    pairs, _, _ = case([SINGLE], 0, [2.0])
    loss, stats = reward_loss("end", torch.ones(1, 1), torch.ones(1, 1), pairs)
    assert float(stats["accuracy"]) == 0
    assert float(loss) == near(cost(-2.0), FORMULA)
    assert float(reward_loss("end", torch.ones(1, 1) + 2, torch.ones(1, 1), pairs)[0]) == pytest.approx(math.log(2))


def test_centring_pulls_the_sum_of_a_pair_to_0_and_leaves_the_difference_alone() -> None:
    """TRL's term: the coefficient times the mean of (chosen + rejected)²."""
    pairs, _, _ = case([SINGLE, SINGLE], 0)
    chosen = torch.tensor([[3.0], [1.0]], requires_grad=True)
    rejected = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    with_it = reward_loss("end", chosen, rejected, pairs, 0.5)[0]
    without = reward_loss("end", chosen, rejected, pairs)[0]
    term = with_it - without
    assert_near(term, 0.5 * (16 + 0) / 2, FORMULA)
    first, second = torch.autograd.grad(term, (chosen, rejected))
    assert_near(first - second, [[0.0], [0.0]], FORMULA)
