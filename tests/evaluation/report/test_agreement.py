# SPDX-License-Identifier: Apache-2.0
"""Agreement of raters, on tables small enough to work out by hand."""

import pytest

from dschat.common.statistics import Rate
from dschat.evaluation.report.results import agreement, group_agreement, majority


def rated(verdicts: str) -> dict[int, str]:
    """Item → verdict, from letters: A, B, t(ie), i(nvalid), s(kip), - not rated."""
    names = {"A": "A", "B": "B", "t": "tie", "i": "invalid", "s": "skip"}
    return {number: names[letter] for number, letter in enumerate(verdicts) if letter != "-"}


def test_cohens_kappa_of_a_two_by_two_table():
    """A/A 20, A/B 5, B/A 10, B/B 15: observed 0.7, by chance 0.5 · 0.6 + 0.5 · 0.4 = 0.5, kappa 0.2 / 0.5 = 0.4."""
    result = agreement(("x", "y"), rated("A" * 25 + "B" * 25), rated("A" * 20 + "B" * 5 + "A" * 10 + "B" * 15))
    assert (result.raters, result.items, result.decided) == (("x", "y"), 50, 50)
    assert result.same.value == pytest.approx(0.7) and result.same_decided == result.same
    # Wilson: (0.7 + 0.0384146 ± 1.959964 · √(0.21 / 50 + 3.841459 / 10000)) / 1.0768292 = 0.685730 ± 0.123234.
    assert (result.same.low, result.same.high) == pytest.approx((0.562496, 0.808964), abs=2e-6)
    assert result.kappa.value == pytest.approx(0.4)
    assert result.kappa.low < 0.4 < result.kappa.high


def test_cohens_kappa_with_ties():
    """Ten items; six on the diagonal; by chance (4 · 5 + 2 · 2 + 4 · 3) / 100 = 0.36; kappa 0.24 / 0.64 = 0.375."""
    result = agreement(("x", "y"), rated("AAAAttBBBB"), rated("AAAttBABAB"))
    assert result.same.value == pytest.approx(0.6)
    assert result.kappa.value == pytest.approx(0.375)
    # Without ties AAA beside AAA and BBBB beside ABAB: 5 of 7.
    assert result.decided == 7
    assert result.same_decided.value == pytest.approx(5 / 7)


def test_only_items_with_two_verdicts_that_count_are_common():
    result = agreement(("x", "y"), rated("AABi-sB"), rated("ABBAAAs"))
    assert result.items == 3 and result.same.value == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("first", "second", "kappa"),
    [
        ("AAAA", "AAAA", None),  # chance alone makes them agree always
        ("tttt", "tttt", None),
        ("A", "A", None),
        ("A", "B", Rate(0.0)),  # 0 of 1, by chance 0
        ("AABB", "AABB", Rate(1.0)),  # the formula's error is 0: no interval
        ("AABB", "BBAA", Rate(-1.0)),  # 0 of 4, by chance 0.5
    ],
)
def test_edges_of_kappa(first, second, kappa):
    assert agreement(("x", "y"), rated(first), rated(second)).kappa == kappa


def test_no_common_item():
    result = agreement(("x", "y"), rated("AA--"), rated("--BB"))
    assert (result.items, result.same, result.kappa, result.same_decided) == (0, None, None, None)
    group = group_agreement("g", {"x": rated("AA--"), "y": rated("--BB"), "z": rated("AAAA")})
    assert (group.items, group.same, group.kappa) == (0, None, None)


def test_fleiss_kappa_of_three_raters():
    """AAA, AAB, BBB, BAB: pairs agree in 1, 1/3, 1, 1/3, mean 2/3; A and B 6 of 12 each, chance 1/2: kappa 1/3."""
    group = group_agreement("people", {"x": rated("AABB"), "y": rated("AABA"), "z": rated("ABBB")})
    assert (group.name, group.raters, group.items) == ("people", ("x", "y", "z"), 4)
    assert group.same == pytest.approx(2 / 3)
    assert group.kappa == pytest.approx(1 / 3)


def test_fleiss_kappa_with_ties_and_passes():
    """The pass leaves AtB and AAA: pairs agree in 0 and 1; A 4/6, tie 1/6, B 1/6, chance 18/36: kappa 0."""
    group = group_agreement("people", {"x": rated("AAA"), "y": rated("tAs"), "z": rated("BAA")})
    assert group.items == 2
    assert group.same == pytest.approx(0.5)
    assert group.kappa == pytest.approx(0.0, abs=1e-12)


def test_fleiss_kappa_of_one_verdict_is_not_defined():
    assert group_agreement("g", dict.fromkeys("xyz", rated("AAA"))).kappa is None
    assert group_agreement("g", dict.fromkeys("xyz", rated("AAA"))).same == 1.0


@pytest.mark.parametrize(
    ("votes", "verdict"),
    [
        (["A", "A", "B"], "A"),
        (["A", "B"], "tie"),
        (["A", "B", "tie"], "tie"),
        (["tie", "tie", "B"], "tie"),
        (["skip", "B"], "B"),
    ],
)
def test_majority(votes, verdict):
    assert majority({"item": votes}) == {"item": verdict}


def test_without_a_vote_that_counts_there_is_no_majority():
    assert majority({"item": ["skip", "skip"]}) == {}
