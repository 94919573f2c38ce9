# SPDX-License-Identifier: Apache-2.0
"""Win rates at equal length, where the regression can be solved by hand.

With two values of the length term, ±t, a regression of two coefficients meets both shares exactly:
logit p₊ = a + bt and logit p₋ = a − bt, so that a = (logit p₊ + logit p₋) / 2, with the variance
(1 / n₊p₊q₊ + 1 / n₋p₋q₋) / 4, times n / (n − 2) for the robust one.
"""

import math

import pytest

from dschat.common.statistics import Rate, win_rates
from dschat.evaluation.report import results

Z = 1.959963984540054  # 97.5 % of a normal distribution


def length_controlled(verdicts, differences, items=None):
    """Without items every verdict is about one of its own."""
    return results.length_controlled(verdicts, differences, list(range(len(verdicts))) if items is None else items)


def two_lengths(longer: tuple[int, int], shorter: tuple[int, int]) -> tuple[list[str], list[int]]:
    """Verdicts and differences: (wins, losses) where A is 30 characters longer, and where it is 30 shorter.

    tanh(d / sd) differs in size between the two values unless both are as many; what matters is that there are two.
    """
    verdicts = ["A"] * longer[0] + ["B"] * longer[1] + ["A"] * shorter[0] + ["B"] * shorter[1]
    return verdicts, [30] * sum(longer) + [-30] * sum(shorter)


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_verdicts_that_follow_length_alone_give_one_half():
    """A is longer in 40 of 50 items, and the longer one wins in 80 % of both: 34 wins, and yet no better."""
    verdicts, gaps = two_lengths((32, 8), (2, 8))
    assert win_rates(verdicts).win.value == 0.68
    result = length_controlled(verdicts, gaps)
    assert result.rate.value == pytest.approx(0.5, abs=1e-9)
    half_width = Z * math.sqrt((1 / (40 * 0.16) + 1 / (10 * 0.16)) / 4 * 50 / 48)
    ends = [1 / (1 + math.exp(-sign * half_width)) for sign in (-1, 1)]
    assert [result.rate.low, result.rate.high] == pytest.approx(ends, abs=1e-6)
    assert result.slope > 0 and result.remark == ""


def test_length_is_taken_out_of_a_real_lead():
    """0.9 where A is longer and 0.4 where it is shorter: logits 2.197225 and −0.405465, mean 0.895880, 71.01 %."""
    result = length_controlled(*two_lengths((36, 4), (4, 6)))
    assert result.rate.value == pytest.approx(0.710102, abs=1e-6)
    mean = (logit(0.9) + logit(0.4)) / 2
    half_width = Z * math.sqrt((1 / (40 * 0.09) + 1 / (10 * 0.24)) / 4 * 50 / 48)
    ends = [1 / (1 + math.exp(-mean - sign * half_width)) for sign in (-1, 1)]
    assert [result.rate.low, result.rate.high] == pytest.approx(ends, abs=1e-6)


def test_a_tie_is_half_a_win():
    """10 ties in place of 5 wins and 5 losses leave the rate; the interval narrows."""
    verdicts, gaps = two_lengths((20, 10), (8, 12))
    ties = ["A"] * 15 + ["tie"] * 10 + ["B"] * 5 + ["A"] * 8 + ["B"] * 12
    plain, tied = length_controlled(verdicts, gaps), length_controlled(ties, gaps)
    assert tied.rate.value == pytest.approx(plain.rate.value, abs=1e-9)
    assert tied.rate.high - tied.rate.low < plain.rate.high - plain.rate.low


def test_votes_on_one_item_do_not_narrow_the_interval():
    verdicts, gaps = two_lengths((20, 10), (8, 12))
    once = length_controlled(verdicts, gaps).rate
    twice = length_controlled(verdicts * 2, gaps * 2, list(range(50)) * 2).rate
    apart = length_controlled(verdicts * 2, gaps * 2).rate
    # Clustered: the factor is 50/49 · 99/98 of a variance of the same size instead of 50/48.
    assert twice.high - twice.low == pytest.approx(once.high - once.low, rel=0.01)
    assert apart.high - apart.low < 0.75 * (once.high - once.low)


def test_exchanging_the_models_mirrors_the_rate():
    verdicts, gaps = two_lengths((36, 4), (4, 6))
    swapped = [{"A": "B", "B": "A"}[verdict] for verdict in verdicts]
    there, back = length_controlled(verdicts, gaps).rate, length_controlled(swapped, [-gap for gap in gaps]).rate
    assert (1 - back.value, 1 - back.high, 1 - back.low) == pytest.approx((there.value, there.low, there.high))


@pytest.mark.parametrize(
    ("verdicts", "gaps", "words"),
    [
        ([], [], "too few points for one of the models: 0, the regression needs 5"),
        (["A"], [3], "too few points"),
        (["A"] * 50 + ["B"] * 4, range(54), "too few points for one of the models: 4"),
        (["A", "B"] * 10, [7] * 20, "differs by the same length"),
        (["A"] * 10 + ["B"] * 10, range(20, 0, -1), "length tells wins from losses without exception"),
        (["A"] * 10 + ["B"] * 10, range(20), "length tells wins from losses without exception"),
        (["A"] * 10 + ["tie"] * 9 + ["B"] * 10, range(29), "length tells wins from losses without exception"),
        (["A"] * 20 + ["tie"] * 10, range(30), "length tells wins from losses without exception"),
        (
            ["A"] * 12 + ["B"] * 11,
            [*range(1, 11), -1, 10**9, 1, *range(-10, 0)],
            "from losses almost without exception",
        ),
    ],
)
def test_what_cannot_be_estimated_is_said(verdicts, gaps, words):
    result = length_controlled(verdicts, list(gaps))
    assert result.rate is None and result.slope is None and words in result.remark


def test_few_items_with_many_votes_are_few():
    result = length_controlled(["A", "B"] * 10, list(range(20)), [0, 1, 2, 3] * 5)
    assert result.rate is None and "too few items: 4" in result.remark


def test_ties_alone_are_one_half():
    result = length_controlled(["tie"] * 12, list(range(12)))
    assert result.rate == Rate(0.5) and result.remark == "every verdict is a tie"


def test_an_extrapolation_is_called_so():
    verdicts, gaps = two_lengths((20, 10), (8, 12))
    assert "extrapolated" in length_controlled(verdicts, [gap + 100 for gap in gaps]).remark
