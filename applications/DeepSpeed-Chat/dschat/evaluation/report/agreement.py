# SPDX-License-Identifier: Apache-2.0
"""How far raters agree on the same items: raw agreement, Cohen's kappa for two, Fleiss' for more."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from dschat.common.statistics import POINTS, Rate, wilson
from dschat.evaluation.pairs.comparisons import Kind, Verdict
from dschat.evaluation.report.votes import JudgedItem, Vote

CATEGORIES: tuple[Verdict, ...] = ("A", "tie", "B")  # verdicts that count
MAJORITY = "humans' majority"
Verdicts = Mapping[JudgedItem, Verdict]  # of one rater
VotesByRater = Mapping[str, Sequence[Vote]]


@dataclass(frozen=True)
class Agreement:
    """Two raters on the items on which both gave a verdict that counts. Rates of nothing are None."""

    raters: tuple[str, str]
    items: int  # that they have in common
    same: Rate | None  # share of them with the same verdict, with Wilson's interval
    kappa: Rate | None  # Cohen's; None where it is not defined: both gave one and the same verdict always
    decided: int  # items on which neither said tie
    same_decided: Rate | None  # share of these on which they chose the same model


@dataclass(frozen=True)
class GroupAgreement:
    """Three or more raters on the items on which all of them gave a verdict that counts."""

    name: str
    raters: tuple[str, ...]
    items: int  # that all have in common
    same: float | None  # share of equal pairs of verdicts on an item, mean over items; None without an item
    kappa: float | None  # Fleiss'; None where it is not defined: everybody gave one and the same verdict always


def agreements(raters: VotesByRater) -> list[Agreement]:
    """Of each two raters; with several people also of their majority with judges and the reward model, first."""
    people, verdicts = _of_kind("human", raters), _verdicts(raters)
    couples = list(combinations(verdicts, 2))
    if len(people) > 1:
        given: dict[JudgedItem, list[Verdict]] = defaultdict(list)
        for votes in people.values():
            for vote in votes:
                given[vote.item].append(vote.verdict)
        verdicts[MAJORITY] = majority(given)
        couples = [(rater, MAJORITY) for rater in raters if rater not in people] + couples
    return [agreement((one, other), verdicts[one], verdicts[other]) for one, other in couples]


def group_agreements(raters: VotesByRater) -> list[GroupAgreement]:
    """Of three or more people, judges, or raters of any kind."""
    groups = {"humans": _of_kind("human", raters), "judges": _of_kind("judge", raters)}
    if len(raters) not in map(len, groups.values()):
        groups["all raters"] = raters
    return [group_agreement(name, _verdicts(members)) for name, members in groups.items() if len(members) > 2]


def agreement(names: tuple[str, str], first: Verdicts, second: Verdicts) -> Agreement:
    """Agreement of two raters; invalid and skip count as not rated."""
    pairs = _common([first, second])
    decided = [pair for pair in pairs if "tie" not in pair]
    same, same_decided = (wilson(sum(a == b for a, b in some), len(some)) for some in (pairs, decided))
    return Agreement(names, len(pairs), same, _cohen(pairs), len(decided), same_decided)


def group_agreement(name: str, raters: Mapping[str, Verdicts]) -> GroupAgreement:
    """Agreement of three or more raters; invalid and skip count as not rated."""
    from statsmodels.stats.inter_rater import fleiss_kappa

    counts = [[verdicts.count(c) for c in CATEGORIES] for verdicts in _common(list(raters.values()))]
    size = len(raters)
    if not counts:
        return GroupAgreement(name, tuple(raters), 0, None, None)
    same = sum(sum(n * (n - 1) for n in row) for row in counts) / (len(counts) * size * (size - 1))
    used = sum(any(column) for column in zip(*counts, strict=True))
    kappa = float(fleiss_kappa(counts, method="fleiss")) if used > 1 else None
    return GroupAgreement(name, tuple(raters), len(counts), same, kappa)


def majority(votes: Mapping[JudgedItem, Iterable[Verdict]]) -> dict[JudgedItem, Verdict]:
    """Item → the verdict that most people gave; tie where no verdict has the most.

    Invalid votes and passes are left out, and so are items without any other vote.
    """
    verdicts: dict[JudgedItem, Verdict] = {}
    for item, given in votes.items():
        counted = [vote for vote in given if vote in POINTS]
        most = max(map(counted.count, CATEGORIES))
        leaders = [category for category in CATEGORIES if counted.count(category) == most]
        if most:
            verdicts[item] = leaders[0] if len(leaders) == 1 else "tie"
    return verdicts


def _of_kind(kind: Kind, raters: VotesByRater) -> VotesByRater:
    return {rater: votes for rater, votes in raters.items() if votes[0].kind == kind}


def _verdicts(raters: VotesByRater) -> dict[str, Verdicts]:
    return {rater: {vote.item: vote.verdict for vote in votes} for rater, votes in raters.items()}


def _common(raters: Sequence[Verdicts]) -> list[list[Verdict]]:
    """The raters' verdicts on each item for which all gave one that counts."""
    first, *others = raters
    rated = [[verdict, *(other.get(item, "skip") for other in others)] for item, verdict in first.items()]
    return [row for row in rated if all(verdict in POINTS for verdict in row)]


def _cohen(pairs: Sequence[Sequence[Verdict]]) -> Rate | None:
    import numpy as np
    from statsmodels.stats.inter_rater import cohens_kappa

    if len({verdict for pair in pairs for verdict in pair}) < 2:
        return None
    table = [[pairs.count([row, column]) for column in CATEGORIES] for row in CATEGORIES]
    with np.errstate(divide="ignore", invalid="ignore"):  # in its test against 0, which is not used
        result = cohens_kappa(table)
    low, high = float(result.kappa_low), float(result.kappa_upp)
    # Where nobody ever differs the formula's error is 0, which says nothing about other items.
    if not low < high:
        return Rate(float(result.kappa))
    return Rate(float(result.kappa), max(-1.0, low), min(1.0, high))
