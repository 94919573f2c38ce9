# SPDX-License-Identifier: Apache-2.0
"""Rates, intervals and standard errors against formulas written out with their numbers."""

import math

import numpy as np
import pytest

from dschat.base.display import markdown_table, text_table
from dschat.base.statistics import (
    Estimate,
    MeanInterval,
    Rate,
    Tally,
    bootstrap_ratio,
    bounded_interval,
    mean_estimate,
    mean_interval,
    paired_difference,
    score_verdict,
    standard_error,
    wilson,
    win_rates,
)

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


@pytest.mark.parametrize("total", [1, 7, 300])
def test_wilson_of_all_and_of_none_by_hand(total):
    """p = 1: the centre is (1 + z²/2n) / (1 + z²/n), the half width z²/2n / (1 + z²/n): [n / (n + z²), 1]."""
    none, every = wilson(0, total), wilson(total, total)
    assert (none.low, none.value, every.value, every.high) == (0.0, 0.0, 1.0, 1.0)
    assert (none.high, every.low) == pytest.approx((Z**2 / (total + Z**2), total / (total + Z**2)), abs=1e-9)
    assert (every.per_cent.value, every.per_cent.high, none.per_cent.low) == (100.0, 100.0, 0.0)


@pytest.mark.parametrize("kind", [MeanInterval, Rate])
def test_an_interval_contains_its_value(kind):
    """Whatever formula it is by: Wilson's rounds, a percentile bootstrap of a skewed number need not be centred."""
    assert kind(1.0, 0.5, 1 - 2**-53) == kind(1.0, 0.5, 1.0)
    assert kind(0.3, 0.1 + 0.2, 0.4) == kind(0.3, 0.3, 0.4)
    assert kind(0.5, 0.25, 0.75) == kind(0.5, low=0.25, high=0.75) and kind(0.5).low is kind(0.5).high is None


def test_a_rate_of_nothing_is_none():
    assert wilson(0, 0) is None
    assert bootstrap_ratio([], []) is None
    rates = win_rates(["invalid", "skip"])
    assert rates.tally == Tally(0, 0, 0, 1, 1) and (rates.tally.counted, rates.tally.total) == (0, 2)
    assert (rates.win, rates.tie, rates.loss, rates.half) == (None, None, None, None)


def test_verdicts_are_counted_and_only_some_are_the_denominator():
    rates = win_rates(["A"] * 3 + ["tie"] * 2 + ["B"] + ["invalid"] * 4 + ["skip"] * 5)
    assert rates.tally == Tally(wins=3, ties=2, losses=1, invalid=4, skipped=5)
    assert (rates.win.value, rates.tie.value, rates.loss.value) == (3 / 6, 2 / 6, 1 / 6)
    assert rates.half.value == 4 / 6


def test_bootstrap_interval_is_that_of_the_exact_distribution():
    """Drawing 50 of 28 wins, 9 ties and 13 losses with replacement has a distribution that can be written down."""
    rate = win_rates(["A"] * 28 + ["tie"] * 9 + ["B"] * 13).half
    low, high = exact_quantiles({1.0: 28 / 50, 0.5: 9 / 50, 0.0: 13 / 50}, 50)
    assert rate.value == 0.65
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=0.0101)  # one step of the distribution


def test_bootstrap_draws_items_not_votes():
    """Three equal votes on each of ten items are worth ten votes; the rate is that of the votes."""
    verdicts = ["A"] * 6 + ["B"] * 4
    thrice = win_rates(verdicts * 3, items=list(range(10)) * 3)
    assert thrice.half == win_rates(verdicts).half
    assert thrice.tally.counted == 30
    low, high = exact_quantiles({1.0: 0.6, 0.0: 0.4}, 10)
    assert (thrice.half.low, thrice.half.high) == pytest.approx((low, high), abs=0.1001)


def test_standard_errors_by_hand():
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, variance 7, error √(7 / 3).
    assert standard_error([1, 2, 6]) == pytest.approx(math.sqrt(7 / 3))
    assert mean_estimate([1, 2, 6]) == Estimate(3.0, standard_error([1, 2, 6]))
    assert mean_estimate([4.0]) == Estimate(4.0, None)
    # Differences −1, 0, 3: mean 2/3, squares 25/9 + 4/9 + 49/9 = 78/9, variance 39/9, error √(39 / 27).
    difference = paired_difference([1, 2, 6], [2, 2, 3])
    assert difference.mean == pytest.approx(2 / 3)
    assert difference.error == pytest.approx(math.sqrt(39 / 27))
    with pytest.raises(ValueError):
        paired_difference([1.0], [1.0, 2.0])


def test_the_interval_of_a_mean_by_hand():
    # 1, 2, 6: mean 3, error √(7 / 3); t with 2 degrees of freedom leaves 2.5 % above 4.3027.
    found = mean_interval([1, 2, 6])
    assert (found.value, found.low) == pytest.approx((3, 3 - 4.3027 * math.sqrt(7 / 3)), abs=1e-3)
    assert found.high - found.value == pytest.approx(found.value - found.low)
    assert mean_interval([4.0]) == MeanInterval(4.0)


def test_the_interval_of_a_bounded_mean_by_hand():
    """0, 0, 3 drawn three times: the mean is k ~ Binomial(3, 1/3), 0 in 30 %, 3 in 3.7 %; Student's begins at −3.3."""
    assert bounded_interval([0, 3, 0], [1, 1, 1]) == MeanInterval(1, 0, 3)
    assert mean_interval([0, 3, 0]).low < -3
    assert bounded_interval([4.0], [1]) == bounded_interval([4.0, 8.0], [1, 2]) == MeanInterval(4.0)


def test_texts():
    assert MeanInterval(0.5, 0.25, 0.75).text(2) == "0.50 [0.25, 0.75]" and MeanInterval(1.0).text() == "1.000"
    assert Rate(0.62, 0.4815, 0.7414).text() == "62.0 [48.1, 74.1]"
    assert Rate(1.0).text() == "100.0"
    assert Estimate(0.5, 0.25).text(2) == "0.50 ± 0.25"
    assert Estimate(math.nan).text() == "–"


@pytest.mark.parametrize(
    ("scores", "margin", "verdict"), [((1, 0), 0, "A"), ((1, 1.5), 0.5, "tie"), ((1, 1.6), 0.5, "B")]
)
def test_the_higher_score_wins_beyond_the_margin(scores, margin, verdict):
    assert score_verdict(*scores, margin) == verdict


def test_tables_pad_by_the_width_on_a_terminal():
    lines = text_table(["who", "n"], [["日本", "1"], ["e\u0301a", "20"]]).splitlines()
    assert lines == ["who    n", "--------", "日本   1", "e\u0301a    20"]


def test_tables_as_markdown():
    lines = markdown_table(["who", "n"], [["日本", "1"], ["a|b", "20"]]).splitlines()
    assert lines == ["| who  |   n |", "|------|----:|", "| 日本 |   1 |", "| a\\|b |  20 |"]
