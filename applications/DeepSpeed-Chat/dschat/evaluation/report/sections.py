# SPDX-License-Identifier: Apache-2.0
"""Votes sorted into sections, one per pair of models and data set, and in each by rater, one vote per item."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dschat.errors import UserError
from dschat.evaluation.pairs.comparisons import KINDS, combined
from dschat.evaluation.report.votes import FLAG, JudgedItem, Vote, reward_vote


@dataclass(frozen=True)
class Section:
    """The votes on one pair of models on one data set, all with the models in the same order."""

    models: tuple[str, str]  # names of the first and the second
    dataset: str  # its name, or empty
    votes: dict[str, list[Vote]]  # rater → one per item; judges first, then people, then the reward model


def sections_of(votes: Sequence[Vote], margin: float, dataset: str = "") -> list[Section]:
    """Sorts votes into sections by the names of models and data set.

    The first vote of a section decides which model comes first; votes on the same models in the other order are turned
    round. Votes that name no data set belong to the one that other votes on the same models name.

    Args:
        votes: see `read_votes`. Where the reward model has none in a section, the rewards beside verdicts are taken.
        margin: rewards that differ by no more are a tie.
        dataset: of the votes that name none; without it a UserError is raised where it could be one of several.
    """
    named: dict[frozenset[str], list[str]] = defaultdict(list)
    for vote in votes:
        if vote.dataset and vote.dataset not in named[frozenset(vote.models)]:
            named[frozenset(vote.models)].append(vote.dataset)
    sections: dict[tuple[frozenset[str], str], list[Vote]] = defaultdict(list)
    for vote in votes:
        models = frozenset(vote.models)
        home = vote.dataset or dataset or "".join(named[models][:1])
        if not vote.dataset and not dataset and len(named[models]) > 1:
            raise UserError(
                f"{FLAG} {vote.file}: it names no data set, and other files compare {' and '.join(vote.models)} on "
                f"{' and '.join(named[models])}. Say with --dataset which of these it belongs to."
            )
        sections[models, home].append(vote)
    return [_section(home, given, margin) for (_, home), given in sections.items()]


def _section(dataset: str, votes: Sequence[Vote], margin: float) -> Section:
    models = votes[0].models
    oriented = [vote if vote.models == models else vote.mirrored() for vote in votes]
    if not any(vote.kind == "reward" for vote in oriented):
        scored = {vote.item: (vote.rewards, vote.file) for vote in oriented if vote.rewards is not None}
        oriented += [reward_vote(item, pair, models, file, margin) for item, (pair, file) in scored.items()]
    raters: dict[str, list[Vote]] = defaultdict(list)
    for vote in sorted(oriented, key=lambda vote: KINDS.index(vote.kind)):
        name = " ".join(vote.rater.split())
        raters[name if vote.kind == "reward" or name == vote.kind else f"{vote.kind} {name}"].append(vote)
    parts = [part for rater, given in raters.items() for part in _by_file(rater, given)]
    return Section(models, dataset, {rater: _one_per_item(given) for rater, given in parts})


def _by_file(rater: str, votes: list[Vote]) -> list[tuple[str, list[Vote]]]:
    """A rater's votes; by file, with its name in the rater's, where files hold verdicts on the same item and order.

    These are two people of one name, or a judge asked twice; counted together they would pass for more items.
    """
    asked = {(vote.item, vote.turned) for vote in votes}
    if len(asked) == len(votes):
        return [(rater, votes)]
    stems = {vote.file: vote.file.stem for vote in votes}
    unique = len(set(stems.values())) == len(stems)
    files: dict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        files[vote.file.stem if unique else str(vote.file)].append(vote)
    return [(f"{rater} ({name})", given) for name, given in files.items()]


def _one_per_item(votes: Sequence[Vote]) -> list[Vote]:
    """Joins a rater's votes on an item, given in files of opposite order of the models, as a judge's two orders."""
    items: dict[JudgedItem, list[Vote]] = defaultdict(list)
    for vote in votes:
        items[vote.item].append(vote)
    return [
        replace(
            given[0],
            verdict=combined([vote.verdict for vote in given]),
            showings=tuple(shown for vote in given for shown in vote.showings),
            aspects={
                name: combined([vote.aspects[name] for vote in given])
                for name in given[0].aspects
                if all(name in vote.aspects for vote in given)
            },
        )
        for given in items.values()
    ]
