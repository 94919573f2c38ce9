# SPDX-License-Identifier: Apache-2.0
"""Agreement of raters, and win rates at equal length, in cases that can be worked out by hand."""

import math

import pandas as pd
import pytest

from dschat.base.statistics import MeanInterval, Rate
from dschat.evaluation import results
from dschat.evaluation.results import group_agreement

COUNTED = {"A": "A", "B": "B", "t": "tie"}


def rated(verdicts: str) -> pd.Series:
    """Verdicts by item, from letters: A, B, t(ie), and - where none counts."""
    return pd.Series([COUNTED.get(letter) for letter in verdicts], dtype=object)


def agreement(first: str, second: str) -> dict:
    """Of raters x and y."""
    return results.agreement(rated(first).rename("x"), rated(second).rename("y"))


def agreement_of_three(x: str, y: str, z: str) -> dict:
    return group_agreement("people", pd.DataFrame({"x": rated(x), "y": rated(y), "z": rated(z)}))


@pytest.mark.parametrize("count", [10, 20, 30, 50])
def test_a_rater_who_always_says_the_same_has_no_interval(count):
    """The formula's standard error is 0, but for rounding."""
    kappa = agreement("A" * count, "A" * (count - 3) + "BBt")["kappa"]
    assert (kappa.value, kappa.low, kappa.high) == (pytest.approx(0, abs=1e-9), None, None)


def test_cohens_kappa_with_ties():
    """Ten items; six on the diagonal; by chance (4 · 5 + 2 · 2 + 4 · 3) / 100 = 0.36; kappa 0.24 / 0.64 = 0.375."""
    result = agreement("AAAAttBBBB", "AAAttBABAB")
    assert result["same"].value == pytest.approx(0.6)
    assert result["kappa"].value == pytest.approx(0.375) and result["kappa"].low < 0.375 < result["kappa"].high
    # Without ties AAA beside AAA and BBBB beside ABAB: 5 of 7.
    assert result["decided"] == 7
    assert result["same_decided"].value == pytest.approx(5 / 7)


@pytest.mark.parametrize(
    ("first", "second", "kappa"),
    [
        ("AAAA", "AAAA", None),  # chance alone makes them agree always
        ("AABB", "AABB", MeanInterval(1.0)),  # the formula's error is 0: no interval
        ("AABB", "BBAA", MeanInterval(-1.0)),  # 0 of 4, by chance 0.5
    ],
)
def test_edges_of_kappa(first, second, kappa):
    assert agreement(first, second)["kappa"] == kappa


def test_no_common_item():
    result = agreement("AA--", "--BB")
    assert (result["items"], result["same"], result["kappa"], result["same_decided"]) == (0, None, None, None)
    group = agreement_of_three("AA--", "--BB", "AAAA")
    assert (group["items"], group["same"], group["kappa"]) == (0, None, None)


def test_fleiss_kappa_of_three_raters():
    """AAA, AAB, BBB, BAB: pairs agree in 1, 1/3, 1, 1/3, mean 2/3; A and B 6 of 12 each, chance 1/2: kappa 1/3."""
    group = agreement_of_three("AABB", "AABA", "ABBB")
    assert (group["name"], group["raters"], group["items"]) == ("people", ("x", "y", "z"), 4)
    assert group["same"] == pytest.approx(2 / 3)
    assert group["kappa"] == pytest.approx(1 / 3)


# At equal length
#
# With two values of the length term, ±t, a regression of two coefficients meets both shares exactly:
# logit p₊ = a + bt and logit p₋ = a − bt, so that a = (logit p₊ + logit p₋) / 2, with the variance
# (1 / n₊p₊q₊ + 1 / n₋p₋q₋) / 4, times n / (n − 2) for the robust one.

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


def ends_by_hand(mean: float, longer: float, shorter: float) -> list[float]:
    """Of the interval around a logit, from n · p · q of both lengths; n is 50 in all."""
    half_width = Z * math.sqrt((1 / longer + 1 / shorter) / 4 * 50 / 48)
    return [1 / (1 + math.exp(-mean - sign * half_width)) for sign in (-1, 1)]


def test_length_is_taken_out_of_a_real_lead():
    """0.9 where A is longer and 0.4 where it is shorter: logits 2.197225 and −0.405465, mean 0.895880, 71.01 %."""
    result = length_controlled(*two_lengths((36, 4), (4, 6)))
    assert result.rate.value == pytest.approx(0.710102, abs=1e-6)
    ends = ends_by_hand((logit(0.9) + logit(0.4)) / 2, 40 * 0.09, 10 * 0.24)
    assert [result.rate.low, result.rate.high] == pytest.approx(ends, abs=1e-6)
    assert result.slope > 0 and result.remark == ""


def test_votes_on_one_item_do_not_narrow_the_interval():
    verdicts, gaps = two_lengths((20, 10), (8, 12))
    once = length_controlled(verdicts, gaps).rate
    twice = length_controlled(verdicts * 2, gaps * 2, list(range(50)) * 2).rate
    apart = length_controlled(verdicts * 2, gaps * 2).rate
    # Clustered: the factor is 50/49 · 99/98 of a variance of the same size instead of 50/48.
    assert twice.high - twice.low == pytest.approx(once.high - once.low, rel=0.01)
    assert apart.high - apart.low < 0.75 * (once.high - once.low)


@pytest.mark.parametrize(
    ("verdicts", "gaps", "words"),
    [
        (["A"] * 50 + ["B"] * 4, range(54), "too few points for one of the models: 4"),
        (["A", "B"] * 10, [7] * 20, "differs by the same length"),
        (["A"] * 10 + ["tie"] * 9 + ["B"] * 10, range(29), "length tells wins from losses without exception"),
        (["A"] * 12 + ["B"] * 11, [*range(1, 11), -1, 10**9, 1, *range(-10, 0)], "almost without exception"),
    ],
)
def test_what_cannot_be_estimated_is_said(verdicts, gaps, words):
    result = length_controlled(verdicts, list(gaps))
    assert result.rate is None and result.slope is None and words in result.remark


def test_votes_on_few_items_are_few_and_ties_alone_are_a_half():
    few = length_controlled(["A", "B"] * 10, list(range(20)), [0, 1, 2, 3] * 5)
    assert few.rate is None and "too few items: 4" in few.remark
    ties = length_controlled(["tie"] * 12, list(range(12)))
    assert ties.rate == Rate(0.5) and ties.remark == "every verdict is a tie"


def test_a_model_that_is_always_longer_is_said_to_be_extrapolated():
    verdicts, gaps = two_lengths((20, 10), (8, 12))
    assert "extrapolated" in length_controlled(verdicts, [gap + 100 for gap in gaps]).remark
