# SPDX-License-Identifier: Apache-2.0
"""The numbers of one section: each rater's rates, position, length, and how far raters agree."""

from collections.abc import Sequence
from dataclasses import dataclass

from dschat.common.statistics import (
    POINTS,
    Estimate,
    Rate,
    WinRates,
    bootstrap_ratio,
    mean_estimate,
    paired_difference,
    wilson,
    win_rates,
)
from dschat.evaluation.pairs.comparisons import Kind
from dschat.evaluation.report.agreement import Agreement, GroupAgreement, agreements, group_agreements
from dschat.evaluation.report.length_control import LengthControlled, length_controlled
from dschat.evaluation.report.sections import Section
from dschat.evaluation.report.votes import JudgedItem, Vote


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


def section_result(section: Section) -> SectionResult:
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
