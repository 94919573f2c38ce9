# SPDX-License-Identifier: Apache-2.0
"""Votes sorted into sections, one per pair of models and data set, and in each by rater, one vote per item."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dschat.evaluation.judge.verdicts import combined
from dschat.evaluation.pairs.comparisons import Kind
from dschat.evaluation.report.votes import Item, Vote, reward_vote

Key = tuple[frozenset[str], str]  # names of the models, data set


@dataclass(frozen=True)
class Rater:
    """Who voted: a judge model, a person, the reward model."""

    kind: Kind
    name: str

    @property
    def label(self) -> str:
        """`judge NAME`, `human NAME`, or the reward model's name."""
        name = " ".join(self.name.split())
        return name if self.kind == "reward" or name == self.kind else f"{self.kind} {name}"


@dataclass(frozen=True)
class Section:
    """The votes on one pair of models on one data set, all with the models in the same order.

    Attributes:
        models: names of the first and the second model.
        dataset: its name, or empty.
        votes: rater → votes, one per item; judges first, then people, then the reward model.
    """

    models: tuple[str, str]
    dataset: str
    votes: dict[Rater, list[Vote]]


def sections_of(votes: Sequence[Vote], scored: Sequence[Sequence[Vote]], margin: float) -> list[Section]:
    """Sorts votes into sections.

    The first vote of a section decides which model comes first; votes on the same models in the other order are turned
    round. A reward model's votes belong where most of the items are theirs, whatever the models are called. Votes
    without a data set belong to those on the same models that share a prompt with them.

    Args:
        votes: of judges and people.
        scored: the reward model's, for each pair of files. Where there are none on a pair of models, the rewards that
            stand beside verdicts are taken.
        margin: rewards that differ by no more are a tie.
    """
    groups: dict[Key, list[Vote]] = defaultdict(list)
    for vote in votes:
        groups[frozenset(vote.models), vote.dataset].append(vote)
    _join_unnamed(groups)
    by_name = sorted(scored, key=lambda ours: all(names != set(ours[0].models) for names, _ in groups))
    strangers = [ours for ours in by_name if not _join_by_items(groups, ours)]
    for ours in strangers:
        groups[frozenset(ours[0].models), ""] += ours
    _join_unnamed(groups)
    return [_section(key[1], group, margin) for key, group in groups.items()]


def _join_unnamed(groups: dict[Key, list[Vote]]) -> None:
    """Moves votes without a data set to the votes on the same models with the most prompts in common."""
    for key in [key for key in groups if not key[1]]:
        prompts = {vote.item.prompt for vote in groups[key]}
        common = {
            other: len(prompts & {vote.item.prompt for vote in group})
            for other, group in groups.items()
            if other[0] == key[0] and other != key
        }
        home = max(common, key=lambda other: common[other], default=None)
        if home is not None and common[home]:
            groups[home] += groups.pop(key)


def _join_by_items(groups: dict[Key, list[Vote]], scored: Sequence[Vote]) -> bool:
    """Adds scored votes to the first unscored group of which they hold most items; whether there is one."""
    ours = {vote.item for vote in scored}
    turned = {item.mirrored() for item in ours}
    for group in groups.values():
        if any(vote.kind == "reward" for vote in group):
            continue
        models = group[0].models
        items = {(vote if vote.models == models else vote.mirrored()).item for vote in group}
        direct, crossed = len(items & ours), len(items & turned)
        if 2 * max(direct, crossed) > len(items):
            oriented = scored if direct >= crossed else [vote.mirrored() for vote in scored]
            group += [replace(vote, models=models) for vote in oriented]
            return True
    return False


def _section(dataset: str, votes: Sequence[Vote], margin: float) -> Section:
    models = votes[0].models
    oriented = [vote if vote.models == models else vote.mirrored() for vote in votes]
    if not any(vote.kind == "reward" for vote in oriented):
        oriented += _rewards_beside(oriented, margin)
    raters: dict[Rater, list[Vote]] = defaultdict(list)
    for vote in oriented:
        raters[Rater(vote.kind, vote.rater)].append(vote)
    parts = [part for rater, given in raters.items() for part in _by_file(rater, given)]
    order = ("judge", "human", "reward")
    parts.sort(key=lambda part: order.index(part[0].kind))
    return Section(models, dataset, {rater: _one_per_item(given) for rater, given in parts})


def _rewards_beside(votes: Sequence[Vote], margin: float) -> list[Vote]:
    """The reward model's votes from rewards that stand beside verdicts, one per item."""
    scored = {vote.item: (vote.rewards, vote) for vote in votes if vote.rewards is not None}
    return [reward_vote(item, rewards, vote.models, vote.file, margin) for item, (rewards, vote) in scored.items()]


def _by_file(rater: Rater, votes: list[Vote]) -> list[tuple[Rater, list[Vote]]]:
    """A rater's votes; by file, with its name in the rater's, where files hold verdicts on the same item and order.

    These are two people of one name, or a judge asked twice; counted together they would pass for more items.
    """
    asked = [(vote.item, vote.turned) for vote in votes]
    if len(set(asked)) == len(asked):
        return [(rater, votes)]
    files: dict[str, list[Vote]] = defaultdict(list)
    stems = {vote.file: vote.file.stem for vote in votes}
    unique = len(set(stems.values())) == len(stems)
    for vote in votes:
        files[vote.file.stem if unique else str(vote.file)].append(vote)
    return [(Rater(rater.kind, f"{rater.name} ({name})"), given) for name, given in files.items()]


def _one_per_item(votes: Sequence[Vote]) -> list[Vote]:
    """Joins a rater's votes on an item, given in files of opposite order of the models, as a judge's two orders."""
    items: dict[Item, list[Vote]] = defaultdict(list)
    for vote in votes:
        items[vote.item].append(vote)
    return [given[0] if len(given) == 1 else _joined(given) for given in items.values()]


def _joined(votes: Sequence[Vote]) -> Vote:
    verdicts = [vote.verdict for vote in votes]
    verdict = "skip" if "skip" in verdicts else combined(verdicts)
    shared = [name for name in votes[0].aspects if all(name in vote.aspects for vote in votes)]
    return replace(
        votes[0],
        verdict=verdict,
        showings=tuple(shown for vote in votes for shown in vote.showings),
        aspects={name: combined([vote.aspects[name] for vote in votes]) for name in shared},
    )
