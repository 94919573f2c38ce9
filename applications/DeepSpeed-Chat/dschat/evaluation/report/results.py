# SPDX-License-Identifier: Apache-2.0
"""The numbers of one section: each rater's rates, position, length, and how far raters agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from dschat.common.statistics import (
    Estimate,
    Rate,
    WinRates,
    bootstrap_ratio,
    mean_estimate,
    paired_difference,
    wilson,
    win_rates,
)
from dschat.evaluation.report.agreement import Agreement, GroupAgreement, agreement, group_agreement, majority
from dschat.evaluation.report.length_control import LengthControlled, length_controlled
from dschat.evaluation.report.sections import Rater, Section
from dschat.evaluation.report.votes import Item, Vote


@dataclass(frozen=True)
class Position:
    """What the place of a response did to a rater's verdicts.

    Attributes:
        both_orders: items shown in both orders with a readable verdict in each.
        consistent: share of them with the same verdict in both orders; None where there are none.
        decided: showings in which the first or the second response was preferred.
        first_place: share of them in which the first was, with a bootstrap interval over items; one half is no bias.
    """

    both_orders: int
    consistent: Rate | None
    decided: int
    first_place: Rate | None


@dataclass(frozen=True)
class RaterResult:
    """One rater's verdicts in numbers.

    Attributes:
        label: how tables call the rater.
        kind: judge, human or reward.
        pooled: whether it stands for all people together, whose votes are counted one by one.
        items: number of different items.
        rates: tally and rates.
        length: the length-controlled win rate.
        position: None where no vote tells in which order the responses were shown.
        aspects: criterion → rates of the verdicts on it alone, where the judge gave such.
    """

    label: str
    kind: str
    pooled: bool
    items: int
    rates: WinRates
    length: LengthControlled
    position: Position | None
    aspects: dict[str, WinRates]


@dataclass(frozen=True)
class Means:
    """A number of both models' responses on the same items: means, and their difference, first minus second."""

    first: Estimate
    second: Estimate
    difference: Estimate
    items: int


@dataclass(frozen=True)
class SectionResult:
    """Everything about one pair of models on one data set.

    Attributes:
        models: names of the first and the second model.
        dataset: its name, or empty.
        raters: judges; all people together where there are several, and each; the reward model.
        characters: lengths in characters, over all items of the section.
        words: lengths in words.
        rewards: scores of the reward model; None without.
        agreements: each two raters; with several people also their majority against judges and reward model.
        groups: three or more people, judges, or raters of any kind.
    """

    models: tuple[str, str]
    dataset: str
    raters: list[RaterResult]
    characters: Means
    words: Means
    rewards: Means | None
    agreements: list[Agreement]
    groups: list[GroupAgreement]

    @property
    def names(self) -> tuple[str, str]:
        """The models' names, told apart where they are the same."""
        first, second = self.models
        return (first, second) if first != second else (f"{first} (A)", f"{second} (B)")


def section_result(section: Section) -> SectionResult:
    """Works out the numbers of a section."""
    people = {rater: votes for rater, votes in section.votes.items() if rater.kind == "human"}
    raters: list[RaterResult] = []
    for rater, votes in section.votes.items():
        if rater.kind == "human" and len(people) > 1 and not any(result.pooled for result in raters):
            everyone = [vote for given in people.values() for vote in given]
            raters.append(_rater_result(f"all {len(people)} humans", "human", everyone, pooled=True))
        raters.append(_rater_result(rater.label, rater.kind, votes))
    items = list(dict.fromkeys(vote.item for votes in section.votes.values() for vote in votes))
    scored = [vote for rater, votes in section.votes.items() if rater.kind == "reward" for vote in votes]
    scores = [vote.rewards for vote in scored if vote.rewards is not None]
    return SectionResult(
        models=section.models,
        dataset=section.dataset,
        raters=raters,
        characters=_means([(len(item.response_a), len(item.response_b)) for item in items]),
        words=_means([(len(item.response_a.split()), len(item.response_b.split())) for item in items]),
        rewards=_means(scores) if scores else None,
        agreements=_agreements(section.votes, people),
        groups=_groups(section.votes, people),
    )


def _rater_result(label: str, kind: str, votes: Sequence[Vote], pooled: bool = False) -> RaterResult:
    verdicts, items = [vote.verdict for vote in votes], [vote.item for vote in votes]
    gaps = [len(item.response_a) - len(item.response_b) for item in items]
    return RaterResult(
        label=label,
        kind=kind,
        pooled=pooled,
        items=len(set(items)),
        rates=win_rates(verdicts, items),
        length=length_controlled(verdicts, gaps, items),
        position=_position(votes),
        aspects=_aspects(votes),
    )


def _aspects(votes: Sequence[Vote]) -> dict[str, WinRates]:
    given = {name: [vote for vote in votes if name in vote.aspects] for vote in votes for name in vote.aspects}
    return {
        name: win_rates([vote.aspects[name] for vote in rated], [vote.item for vote in rated])
        for name, rated in given.items()
    }


def _position(votes: Sequence[Vote]) -> Position | None:
    if not any(vote.showings for vote in votes):
        return None
    both = same = 0
    decided: dict[Item, tuple[float, int]] = {}
    for vote in votes:
        read = [shown for shown in vote.showings if shown.verdict in ("A", "B", "tie")]
        if len(read) == len(vote.showings) and len({shown.first for shown in read}) == 2:
            both += 1
            same += len({shown.verdict for shown in read}) == 1
        preferred = [shown for shown in read if shown.verdict != "tie"]
        if preferred:
            first, all_of_it = decided.get(vote.item, (0.0, 0))
            first += sum(shown.verdict == shown.first for shown in preferred)
            decided[vote.item] = (first, all_of_it + len(preferred))
    return Position(both, wilson(same, both), sum(n for _, n in decided.values()), bootstrap_ratio(decided))


def _means(numbers: Sequence[tuple[float, float]]) -> Means:
    first, second = zip(*numbers, strict=True)
    return Means(mean_estimate(first), mean_estimate(second), paired_difference(first, second), len(numbers))


def _verdicts(votes: Sequence[Vote]) -> dict[Item, str]:
    return {vote.item: vote.verdict for vote in votes}


def _agreements(raters: Mapping[Rater, Sequence[Vote]], people: Mapping[Rater, Sequence[Vote]]) -> list[Agreement]:
    verdicts = {rater.label: _verdicts(votes) for rater, votes in raters.items()}
    couples = list(combinations(verdicts, 2))
    if len(people) > 1:
        name = "humans' majority"
        verdicts[name] = _majority(people)
        couples = [(rater.label, name) for rater in raters if rater not in people] + couples
    return [agreement((one, other), verdicts[one], verdicts[other]) for one, other in couples]


def _groups(raters: Mapping[Rater, Sequence[Vote]], people: Mapping[Rater, Sequence[Vote]]) -> list[GroupAgreement]:
    judges = {rater: votes for rater, votes in raters.items() if rater.kind == "judge"}
    candidates = {"humans": people, "judges": judges, "all raters": raters}
    groups = {name: members for name, members in candidates.items() if len(members) > 2}
    if any(name != "all raters" and len(members) == len(raters) for name, members in groups.items()):
        del groups["all raters"]
    return [
        group_agreement(name, {rater.label: _verdicts(votes) for rater, votes in members.items()})
        for name, members in groups.items()
    ]


def _majority(people: Mapping[Rater, Sequence[Vote]]) -> dict[Item, str]:
    given: dict[Item, list[str]] = defaultdict(list)
    for votes in people.values():
        for vote in votes:
            given[vote.item].append(vote.verdict)
    return majority(given)
