# SPDX-License-Identifier: Apache-2.0
"""Rates, intervals and standard errors against formulas written out with their numbers."""

import math

import numpy as np
import pytest

from dschat.common.statistics import (
    Estimate,
    Rate,
    Tally,
    bootstrap_ratio,
    mean_estimate,
    paired_difference,
    score_verdict,
    standard_error,
    tally_of,
    unpaired_error,
    wilson,
    win_rates,
)
from dschat.common.tables import text_table
from dschat.evaluation.report.length_control import length_controlled

Z = 1.959963984540054  # 97.5 % of a normal distribution


def exact_quantiles(shares: dict[float, float], count: int) -> tuple[float, float]:
    """2.5 and 97.5 % quantile of the mean of `count` draws from points in halves, by convolution."""
    one = np.array([shares.get(0.0, 0.0), shares.get(0.5, 0.0), shares.get(1.0, 0.0)])
    total = np.array([1.0])
    for _ in range(count):
        total = np.convolve(total, one)
    below = np.cumsum(total)
    low, high = (int(np.searchsorted(below, part)) / 2 / count for part in (0.025, 0.975))
    return low, high


def test_wilson_is_its_formula():
    # 28 of 50: p = 0.56, z² = 3.841459, z²/n = 0.0768292, centre (0.56 + 0.0384146) / 1.0768292 = 0.555719,
    # half width 1.959964 / 1.0768292 · √(0.56 · 0.44 / 50 + 3.841459 / 10000) = 1.820125 · 0.0728845 = 0.132659.
    rate = wilson(28, 50)
    assert rate.value == 0.56
    assert (rate.low, rate.high) == pytest.approx((0.423060, 0.688378), abs=2e-6)


@pytest.mark.parametrize(("count", "ends"), [(0, (0.0, Z**2 / (1 + Z**2))), (1, (1 / (1 + Z**2), 1.0))])
def test_wilson_of_one_item_stays_between_0_and_1(count, ends):
    rate = wilson(count, 1)
    assert (rate.low, rate.high) == pytest.approx(ends, abs=1e-9)
    assert 0 <= rate.low <= rate.high <= 1


def test_a_rate_of_nothing_is_none():
    assert wilson(0, 0) is None
    assert bootstrap_ratio({}) is None
    rates = win_rates(["invalid", "skip"])
    assert rates.tally == Tally(0, 0, 0, 1, 1) and (rates.tally.counted, rates.tally.given) == (0, 2)
    assert (rates.win, rates.tie, rates.loss, rates.half) == (None, None, None, None)


def test_verdicts_are_counted_and_only_some_are_the_denominator():
    rates = win_rates(["A"] * 3 + ["tie"] * 2 + ["B"] + ["invalid"] * 4 + ["skip"] * 5)
    assert rates.tally == Tally(wins=3, ties=2, losses=1, invalid=4, skipped=5)
    assert (rates.win.value, rates.tie.value, rates.loss.value) == (3 / 6, 2 / 6, 1 / 6)
    assert rates.half.value == 4 / 6
    assert tally_of([]) == Tally(0, 0, 0)


def test_bootstrap_interval_is_that_of_the_exact_distribution():
    """Drawing 50 of 28 wins, 9 ties and 13 losses with replacement has a distribution that can be written down."""
    rate = win_rates(["A"] * 28 + ["tie"] * 9 + ["B"] * 13).half
    low, high = exact_quantiles({1.0: 28 / 50, 0.5: 9 / 50, 0.0: 13 / 50}, 50)
    assert rate.value == 0.65
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=0.0101)  # one step of the distribution
    assert win_rates(["A"] * 28 + ["tie"] * 9 + ["B"] * 13).half == rate, "the same file, the same interval"


def test_bootstrap_draws_items_not_votes():
    """Three equal votes on each of ten items are worth ten votes; the rate is that of the votes."""
    verdicts = ["A"] * 6 + ["B"] * 4
    thrice = win_rates(verdicts * 3, items=list(range(10)) * 3)
    assert thrice.half == win_rates(verdicts).half
    assert thrice.tally.counted == 30
    low, high = exact_quantiles({1.0: 0.6, 0.0: 0.4}, 10)
    assert (thrice.half.low, thrice.half.high) == pytest.approx((low, high), abs=0.1001)


@pytest.mark.parametrize("verdicts", [["A"], ["tie"] * 5, ["B"] * 5])
def test_equal_verdicts_have_no_bootstrap_interval(verdicts):
    value = {"A": 1.0, "tie": 0.5, "B": 0.0}[verdicts[0]]
    assert win_rates(verdicts).half == Rate(value)


def test_standard_errors_by_hand():
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, variance 7, error √(7 / 3).
    assert standard_error([1, 2, 6]) == pytest.approx(math.sqrt(7 / 3))
    assert mean_estimate([1, 2, 6]) == Estimate(3.0, standard_error([1, 2, 6]))
    assert mean_estimate([4.0]) == Estimate(4.0, None)
    # Differences −1, 0, 3: mean 2/3, squares 25/9 + 4/9 + 49/9 = 78/9, variance 39/9, error √(39 / 27).
    difference = paired_difference([1, 2, 6], [2, 2, 3])
    assert difference.mean == pytest.approx(2 / 3)
    assert difference.error == pytest.approx(math.sqrt(39 / 27))
    # 2, 2, 3 has variance 1/3: √(7/3 + 1/9).
    assert unpaired_error([1, 2, 6], [2, 2, 3]) == pytest.approx(math.sqrt(7 / 3 + 1 / 9))
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 2.0])


def test_texts():
    assert Rate(0.62, 0.4815, 0.7414).text() == "62.0 [48.1, 74.1]"
    assert Rate(1.0).text() == "100.0"
    assert Estimate(0.5, 0.25).text(2) == "0.50 ± 0.25"
    assert Estimate(math.nan).text() == "–"


@pytest.mark.parametrize(
    ("scores", "margin", "verdict"),
    [((1, 0), 0, "A"), ((0, 1), 0, "B"), ((1, 1), 0, "tie"), ((1, 1.5), 0.5, "tie"), ((1, 1.6), 0.5, "B")],
)
def test_the_higher_score_wins_beyond_the_margin(scores, margin, verdict):
    assert score_verdict(*scores, margin) == verdict


# Length control. With two values of the length term, ±t, a regression of two coefficients meets both shares exactly:
# logit p₊ = a + bt and logit p₋ = a − bt, so that a = (logit p₊ + logit p₋) / 2, with the variance
# (1 / n₊p₊q₊ + 1 / n₋p₋q₋) / 4, times n / (n − 2) for the robust one.


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


def test_tables_pad_by_the_width_on_a_terminal():
    lines = text_table(["who", "n"], [["日本", "1"], ["e\u0301a", "20"]]).splitlines()
    assert lines == ["who    n", "--------", "日本   1", "e\u0301a    20"]


def test_votes_of_several_people_on_an_item_count_as_one_piece_of_evidence():
    """Three people with the same votes know no more than one: the interval is that of 50 items, not of 150."""
    verdicts = ["A"] * 24 + ["tie"] * 6 + ["B"] * 20
    thrice = win_rates(verdicts * 3, list(range(50)) * 3)
    width = 2 * 1.96 * math.sqrt(0.48 * 0.52 / 50)  # the normal approximation for 24 of 50
    for rate, count in ((thrice.win, 24), (thrice.tie, 6), (thrice.loss, 20)):
        assert rate.value == pytest.approx(count / 50)
    assert thrice.win.high - thrice.win.low == pytest.approx(width, rel=0.1)
    assert win_rates(verdicts, list(range(50))).win == win_rates(verdicts).win
