# SPDX-License-Identifier: Apache-2.0
"""The numbers of a section: rates, place and length, and how far raters agree."""

import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import multimode
from typing import Any

from dschat.base.statistics import (
    POINTS,
    Estimate,
    MeanInterval,
    Rate,
    WinRates,
    bootstrap_ratio,
    mean_estimate,
    paired_difference,
    wilson,
    win_rates,
)
from dschat.lab.responses import Kind, Verdict
from dschat.lab.votes import JudgedItem, Vote, VoteSection

CATEGORIES: tuple[Verdict, ...] = ("A", "tie", "B")  # verdicts that count
MAJORITY = "humans' majority"
Verdicts = Mapping[JudgedItem, Verdict]  # of one rater
VotesByRater = Mapping[str, Sequence[Vote]]
FEWEST = 5  # points that either model must have for the regression: below, its errors are not to be trusted


@dataclass(frozen=True)
class Agreement:
    """Two raters on the items on which both gave a verdict that counts. Rates of nothing are None."""

    raters: tuple[str, str]
    items: int  # that they have in common
    same: Rate | None  # share of them with the same verdict, with Wilson's interval
    kappa: MeanInterval | None  # Cohen's; None where it is not defined: both gave one and the same verdict always
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
        leaders = multimode(vote for vote in given if vote in POINTS)
        if leaders:
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


def _cohen(pairs: Sequence[Sequence[Verdict]]) -> MeanInterval | None:
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
        return MeanInterval(float(result.kappa))
    return MeanInterval(float(result.kappa), max(-1.0, low), min(1.0, high))


@dataclass(frozen=True)
class LengthControlled:
    """A length-controlled win rate; None where it cannot be estimated."""

    rate: Rate | None = None  # probability that the first model wins at equal length, ties as half
    slope: float | None = None  # coefficient of the length term: positive where longer responses win more often
    remark: str = ""  # why there is no rate, or what to know about it


def length_controlled(
    verdicts: Sequence[str], differences: Sequence[float], items: Sequence[Hashable]
) -> LengthControlled:
    """Fits logit P(first wins) = a + b · tanh(difference / sd of the differences) and gives P at difference 0.

    As in length-controlled AlpacaEval (Dubois et al. 2024), for one pair of models and without its term for the
    prompt. A tie is half a win. The interval is that of a ± 1.96 standard errors, robust, clustered by item.

    Args:
        verdicts: (N,) of A, B, tie; others are left out.
        differences: (N,) length of the first response minus length of the second.
        items: (N,) what each verdict is about.
    """
    import numpy as np

    kept = [index for index, verdict in enumerate(verdicts) if verdict in POINTS]
    points = np.array([POINTS[verdicts[index]] for index in kept])
    gaps = np.array([differences[index] for index in kept], dtype=np.float64)
    numbers = {item: number for number, item in enumerate(dict.fromkeys(items[index] for index in kept))}
    fewer = min(points.sum(), (1 - points).sum())
    if fewer < FEWEST:
        return LengthControlled(
            remark=f"too few points for one of the models: {fewer:g}, the regression needs {FEWEST}"
        )
    if points.min() == points.max():
        return LengthControlled(Rate(0.5), 0.0, "every verdict is a tie")
    if len(set(gaps.tolist())) < 2:
        return LengthControlled(remark="every pair differs by the same length")
    terms = np.tanh(gaps / gaps.std())
    if _separated(points, terms):
        return LengthControlled(remark="length tells wins from losses without exception")
    if len(numbers) < 2 * FEWEST:
        return LengthControlled(remark=f"too few items: {len(numbers)}, the regression needs {2 * FEWEST}")
    fitted = _fit(points, terms, np.array([numbers[items[index]] for index in kept]))
    if fitted is None:
        return LengthControlled(remark="length tells wins from losses almost without exception")
    aside = "" if gaps.min() <= 0 <= gaps.max() else "extrapolated: one model's responses are always the longer ones"
    return LengthControlled(*fitted, aside)


def _separated(points: Any, terms: Any) -> bool:
    """Whether some length splits what was won from what was lost: the coefficients grow without end then.

    Their ranges must overlap by more than a point. Ties between wins and losses would keep the coefficients finite,
    but say little about them, and are left out; where nothing was won, or nothing lost, ties take that side.
    """
    won, lost = terms[points == points.max()], terms[points == points.min()]
    return bool(won.min() >= lost.max() or lost.min() >= won.max())


def _fit(points: Any, terms: Any, groups: Any) -> tuple[Rate, float] | None:
    """Rate at 0 and slope; None where the search for the coefficients does not settle."""
    import numpy as np
    from scipy.special import expit
    from statsmodels.discrete.discrete_model import Logit
    from statsmodels.tools.sm_exceptions import ConvergenceWarning, PerfectSeparationWarning

    unsettled = (ConvergenceWarning, PerfectSeparationWarning, RuntimeWarning)
    with warnings.catch_warnings():
        for warning in unsettled:
            warnings.simplefilter("error", warning)
        try:
            model = Logit(points, np.column_stack([np.ones_like(terms), terms]))
            result = model.fit(disp=False, cov_type="cluster", cov_kwds={"groups": groups})
        except (*unsettled, np.linalg.LinAlgError):
            return None
    at_zero, slope = result.params
    low, high = result.conf_int(alpha=0.05)[0]
    if not np.isfinite([low, high, slope]).all():
        return None
    return Rate(*(float(expit(logit)) for logit in (at_zero, low, high))), float(slope)


@dataclass(frozen=True)
class Position:
    """What the place of a response did to a rater's verdicts. A rate is None where there is nothing to count."""

    both_orders: int  # items shown in both orders with a readable verdict in each
    consistent: Rate | None  # share of them with the same verdict in both orders
    decided: int  # showings in which the first or the second response was preferred
    first_place: Rate | None  # share of them in which the first was, by items; one half is no bias


@dataclass(frozen=True)
class RaterResult:
    """One rater's verdicts in numbers. The fields, here and below, are those of report.json."""

    rater: str  # how tables call the rater
    kind: Kind
    pooled: bool  # whether it stands for all people together, whose votes are counted one by one
    items: int  # number of different items
    rates: WinRates
    length_controlled: LengthControlled
    position: Position | None  # None where no vote tells in which order the responses were shown
    aspects: dict[str, WinRates]  # criterion → rates of the verdicts on it alone, where the judge gave such


@dataclass(frozen=True)
class ModelMeans:
    """A number of both models' responses on the same items: means, and their difference, first minus second."""

    first: Estimate
    second: Estimate
    difference: Estimate
    items: int


@dataclass(frozen=True)
class SectionResult:
    """Everything about one pair of models on one data set."""

    models: tuple[str, str]  # names of the first and the second
    dataset: str  # its name, or empty
    items: int  # number of different items
    means: dict[str, ModelMeans | None]  # of characters and words over all items, and of reward where it is known
    raters: list[RaterResult]  # judges; all people together where there are several, and each; the reward model
    agreement: list[Agreement]  # of each two; of several people's majority with judges and reward model
    group_agreement: list[GroupAgreement]  # three or more people, judges, or raters of any kind

    @property
    def names(self) -> tuple[str, str]:
        """The models' names, told apart where they are the same."""
        first, second = self.models
        return (first, second) if first != second else (f"{first} (A)", f"{second} (B)")


def section_result(section: VoteSection) -> SectionResult:
    """Works out the numbers of a section."""
    people = {rater: votes for rater, votes in section.votes.items() if votes[0].kind == "human"}
    raters = [_rater_result(rater, votes) for rater, votes in section.votes.items()]
    if len(people) > 1:
        everyone = [vote for votes in people.values() for vote in votes]
        first_person = [result.kind for result in raters].index("human")
        raters.insert(first_person, _rater_result(f"all {len(people)} humans", everyone, pooled=True))
    everything = [vote for votes in section.votes.values() for vote in votes]
    items = dict.fromkeys(vote.item for vote in everything)
    scores = [vote.rewards for vote in everything if vote.kind == "reward" and vote.rewards is not None]
    return SectionResult(
        models=section.models,
        dataset=section.dataset,
        items=len(items),
        means={
            "characters": _means([(len(item.response_a), len(item.response_b)) for item in items]),
            "words": _means([(len(item.response_a.split()), len(item.response_b.split())) for item in items]),
            "reward": _means(scores) if scores else None,
        },
        raters=raters,
        agreement=agreements(section.votes),
        group_agreement=group_agreements(section.votes),
    )


def _rater_result(rater: str, votes: Sequence[Vote], pooled: bool = False) -> RaterResult:
    verdicts, items = [vote.verdict for vote in votes], [vote.item for vote in votes]
    gaps = [len(item.response_a) - len(item.response_b) for item in items]
    aspects = {}
    for name in dict.fromkeys(name for vote in votes for name in vote.aspects):
        rated = [vote for vote in votes if name in vote.aspects]
        aspects[name] = win_rates([vote.aspects[name] for vote in rated], [vote.item for vote in rated])
    return RaterResult(
        rater=rater,
        kind=votes[0].kind,
        pooled=pooled,
        items=len(set(items)),
        rates=win_rates(verdicts, items),
        length_controlled=length_controlled(verdicts, gaps, items),
        position=_position(votes) if any(vote.showings for vote in votes) else None,
        aspects=aspects,
    )


def _position(votes: Sequence[Vote]) -> Position:
    both = same = 0
    decided: dict[JudgedItem, tuple[float, int]] = {}  # item → wins of the first place, of how many
    for vote in votes:
        read = [(first, verdict) for first, verdict in vote.showings if verdict in POINTS]
        if len(read) == len(vote.showings) and len({first for first, _ in read}) == 2:
            both += 1
            same += len({verdict for _, verdict in read}) == 1
        preferred = [verdict == first for first, verdict in read if verdict != "tie"]
        if preferred:
            wins, number = decided.get(vote.item, (0.0, 0))
            decided[vote.item] = (wins + sum(preferred), number + len(preferred))
    return Position(both, wilson(same, both), sum(n for _, n in decided.values()), bootstrap_ratio(decided))


def _means(numbers: Sequence[tuple[float, float]]) -> ModelMeans:
    first, second = zip(*numbers, strict=True)
    return ModelMeans(mean_estimate(first), mean_estimate(second), paired_difference(first, second), len(numbers))
