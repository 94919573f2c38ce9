# SPDX-License-Identifier: Apache-2.0
"""How far raters agree on the same items: raw agreement, Cohen's kappa for two, Fleiss' for more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dschat.common.statistics import POINTS, Rate, wilson

CATEGORIES = tuple(POINTS)  # A, tie, B: verdicts that count


@dataclass(frozen=True)
class Agreement:
    """Two raters on the items on which both gave a verdict that counts.

    Attributes:
        raters: their names.
        items: how many items they have in common.
        same: share of them with the same verdict, with Wilson's interval; None without a common item.
        kappa: Cohen's, with its interval; None where it is not defined: both gave one and the same verdict always.
        decided: of these items, those on which neither said tie.
        same_decided: share of the decided ones on which they chose the same model; None where there are none.
    """

    raters: tuple[str, str]
    items: int
    same: Rate | None
    kappa: Rate | None
    decided: int
    same_decided: Rate | None


@dataclass(frozen=True)
class GroupAgreement:
    """Three or more raters on the items on which all of them gave a verdict that counts.

    Attributes:
        name: of the group.
        raters: names of its raters.
        items: how many items all have in common.
        same: share of pairs of verdicts on an item that are the same, mean over items; None without an item.
        kappa: Fleiss'; None where it is not defined: everybody gave one and the same verdict always.
    """

    name: str
    raters: tuple[str, ...]
    items: int
    same: float | None
    kappa: float | None


def agreement(names: tuple[str, str], first: Mapping[Any, str], second: Mapping[Any, str]) -> Agreement:
    """Agreement of two raters.

    Args:
        names: of the raters.
        first: item → verdict of the first rater; invalid and skip count as not rated.
        second: the same of the second.
    """
    pairs = [tuple(verdicts) for verdicts in _common([first, second])]
    decided = [pair for pair in pairs if "tie" not in pair]
    return Agreement(
        raters=names,
        items=len(pairs),
        same=_share_same(pairs),
        kappa=_cohen(pairs),
        decided=len(decided),
        same_decided=_share_same(decided),
    )


def group_agreement(name: str, raters: Mapping[str, Mapping[Any, str]]) -> GroupAgreement:
    """Agreement of three or more raters.

    Args:
        name: of the group.
        raters: rater → item → verdict; invalid and skip count as not rated.
    """
    from statsmodels.stats.inter_rater import fleiss_kappa

    counts = [[verdicts.count(c) for c in CATEGORIES] for verdicts in _common(list(raters.values()))]
    size = len(raters)
    if not counts:
        return GroupAgreement(name, tuple(raters), 0, None, None)
    same = sum(sum(n * (n - 1) for n in row) for row in counts) / (len(counts) * size * (size - 1))
    used = sum(any(row[column] for row in counts) for column in range(len(CATEGORIES)))
    kappa = float(fleiss_kappa(counts, method="fleiss")) if used > 1 else None
    return GroupAgreement(name, tuple(raters), len(counts), same, kappa)


def majority(votes: Mapping[Any, Sequence[str]]) -> dict[Any, str]:
    """Item → the verdict that most people gave; tie where no verdict has the most.

    Args:
        votes: item → verdicts on it; invalid and skip are left out, and so are items without any other.
    """
    verdicts = {}
    for item, given in votes.items():
        counts = {category: sum(vote == category for vote in given) for category in CATEGORIES}
        most = max(counts.values())
        leaders = [category for category, count in counts.items() if count == most]
        if most:
            verdicts[item] = leaders[0] if len(leaders) == 1 else "tie"
    return verdicts


def _common(raters: Sequence[Mapping[Any, str]]) -> list[list[str]]:
    """The raters' verdicts on each item for which all gave one that counts."""
    verdicts = [[rater.get(item, "") for rater in raters] for item in raters[0]]
    return [row for row in verdicts if all(verdict in POINTS for verdict in row)]


def _share_same(pairs: Sequence[tuple[str, ...]]) -> Rate | None:
    return wilson(sum(len(set(pair)) == 1 for pair in pairs), len(pairs))


def _cohen(pairs: Sequence[tuple[str, ...]]) -> Rate | None:
    import numpy as np
    from statsmodels.stats.inter_rater import cohens_kappa

    table = [[pairs.count((row, column)) for column in CATEGORIES] for row in CATEGORIES]
    if len({verdict for pair in pairs for verdict in pair}) < 2:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):  # in its test against 0, which is not used
        result = cohens_kappa(table)
    low, high = float(result.kappa_low), float(result.kappa_upp)
    # Where nobody ever differs the formula's error is 0, which says nothing about other items.
    if not low < high:
        return Rate(float(result.kappa))
    return Rate(float(result.kappa), max(-1.0, low), min(1.0, high))
