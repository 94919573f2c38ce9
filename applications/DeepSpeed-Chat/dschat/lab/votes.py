# SPDX-License-Identifier: Apache-2.0
"""What a report counts: votes, sorted into sections, one per pair of models and data set."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from dschat.base.errors import UserError
from dschat.base.jsonl import read_rows
from dschat.base.statistics import score_verdict
from dschat.lab.responses import (
    FILE,
    KINDS,
    VERDICTS,
    Kind,
    Response,
    Side,
    Verdict,
    combined,
    comparison_of,
    mirrored,
    model_names,
    number_of,
    read_pairs,
    read_responses,
)

REWARD_MODEL = "reward model"

Showing = tuple[Side, Verdict]  # whose response was shown first, and the verdict in this order


class JudgedItem(NamedTuple):
    """What is compared: the responses of two models to a prompt. Equal texts count by their occurrence in a file."""

    prompt: str
    response_a: str
    response_b: str
    occurrence: int = 0


@dataclass(frozen=True)
class Vote:
    """A verdict on an item."""

    item: JudgedItem
    verdict: Verdict
    kind: Kind
    rater: str  # name of the judge model or person
    models: tuple[str, str]  # names of the first and the second
    dataset: str  # its name, or empty
    file: Path  # where it was read
    showings: tuple[Showing, ...] = ()  # the orders behind the verdict; empty where the row does not tell
    rewards: tuple[float, float] | None = None  # the reward model's scores of both responses, where they are known
    aspects: Mapping[str, Verdict] = field(default_factory=dict)  # criterion → verdict, where the judge gave one
    turned: bool = False  # whether the models stand here the other way round than in the file

    def mirrored(self) -> "Vote":
        """The same vote with the models exchanged."""
        sides: dict[Side, Side] = {"A": "B", "B": "A"}
        return replace(
            self,
            item=self.item._replace(response_a=self.item.response_b, response_b=self.item.response_a),
            verdict=mirrored(self.verdict),
            models=(self.models[1], self.models[0]),
            showings=tuple((sides[first], mirrored(verdict)) for first, verdict in self.showings),
            rewards=None if self.rewards is None else (self.rewards[1], self.rewards[0]),
            aspects={name: mirrored(verdict) for name, verdict in self.aspects.items()},
            turned=not self.turned,
        )


def read_votes(files: Sequence[Path], margin: float) -> list[Vote]:
    """Reads files of verdicts and of responses, told apart by their columns; one given twice counts once.

    The votes of judges and people come first, in the order of the files; then the reward model's on each two files of
    responses to the same prompts. Rewards that differ by no more than the margin are a tie. Raises UserError for a bad
    file, and for files of responses that do not fit together or lack rewards.
    """
    votes: list[Vote] = []
    responses: list[Path] = []
    for file in {file.resolve(): file for file in files}.values():
        origin, row = read_rows(file, FILE)[0]
        if "verdict" in row:
            votes += _verdicts(file)
        elif "response" in row:
            responses.append(file)
        else:
            raise UserError(
                f"{origin}: neither a verdict (columns prompt, response_a, response_b, verdict, kind) nor a response "
                f"(prompt, response, reward); its columns are {', '.join(map(repr, row)) or 'none'}."
            )
    return votes + _scored(responses, margin)


def reward_vote(
    item: JudgedItem, rewards: tuple[float, float], models: tuple[str, str], file: Path, margin: float
) -> Vote:
    """The reward model's vote on an item."""
    verdict = score_verdict(*rewards, margin)
    return Vote(item, verdict, "reward", REWARD_MODEL, models, dataset="", file=file, rewards=rewards)


def _verdicts(file: Path) -> list[Vote]:
    occurred: Counter[Any] = Counter()
    votes = []
    for origin, row in read_rows(file, FILE):
        one = comparison_of(row, origin)
        texts, who = (one.prompt, one.response_a, one.response_b), (one.kind, one.rater, (one.model_a, one.model_b))
        a, b = number_of(row, "reward_a", origin), number_of(row, "reward_b", origin)
        vote = Vote(
            JudgedItem(*texts, occurred[texts, who]),
            one.verdict,
            *who,
            dataset=one.dataset,
            file=file,
            showings=_showings(row, one.verdict, origin),
            rewards=None if a is None or b is None else (a, b),
            aspects=_aspects(row, origin),
        )
        occurred[texts, who] += 1
        votes.append(vote)
    return votes


def _showings(row: Mapping[str, Any], verdict: Verdict, origin: str) -> tuple[Showing, ...]:
    """Judges write a list of orders, people the model that was shown first."""
    orders = row.get("orders")
    if orders is None:
        return ((row["first"], verdict),) if row.get("first") in ("A", "B") else ()
    if not isinstance(orders, list) or not all(
        isinstance(order, dict) and order.get("first") in ("A", "B") and order.get("verdict") in VERDICTS
        for order in orders
    ):
        form = f"a list of objects with first (A or B) and verdict ({', '.join(VERDICTS)})"
        raise UserError(f"{origin}: orders must be {form}; correct or remove the column.")
    return tuple((order["first"], order["verdict"]) for order in orders)


def _aspects(row: Mapping[str, Any], origin: str) -> dict[str, Verdict]:
    aspects = row.get("aspects") or {}
    if not isinstance(aspects, dict) or not all(verdict in VERDICTS for verdict in aspects.values()):
        raise UserError(f"{origin}: aspects must be an object of verdicts ({', '.join(VERDICTS)}); correct the row.")
    return aspects


def _scored(files: Sequence[Path], margin: float) -> list[Vote]:
    """The reward model's votes on each two files with the same prompts, of different models.

    An item counts once for two models, also where a sample of their files is given beside the whole ones.
    """
    names = dict(zip(files, model_names(files), strict=True))
    prompts = {file: Counter(response.prompt for response in read_responses(file, FILE)) for file in files}
    models = list(dict.fromkeys(names.values()))
    couples = [
        (one, other)
        for one, other in combinations(sorted(files, key=lambda file: models.index(names[file])), 2)
        if names[one] != names[other] and prompts[one] == prompts[other]
    ]
    for file in files:
        if not any(file in couple for couple in couples):
            others = [other for other in files if names[other] != names[file]]
            remedy = "Give one, sampled with the same command and seed"
            raise UserError(
                f"{FILE} {file}: no file of another model answers the same prompts{_closest(file, others, prompts)}."
                f" {remedy}."
            )
    votes: dict[tuple[tuple[str, str], JudgedItem], Vote] = {}
    for first, second in couples:
        both = (names[first], names[second])
        occurred: Counter[tuple[str, str, str]] = Counter()
        for pair in read_pairs(first, FILE, second, FILE):
            texts = (pair.prompt, pair.a.response, pair.b.response)
            item = JudgedItem(*texts, occurred[texts])
            occurred[texts] += 1
            rewards = (_reward(pair.a), _reward(pair.b))
            votes.setdefault((both, item), reward_vote(item, rewards, both, first, margin))
    return list(votes.values())


def _closest(file: Path, others: Sequence[Path], prompts: Mapping[Path, Counter[str]]) -> str:
    """Which of the other files has most of a file's prompts, and how many; empty where there is no other."""
    if not others:
        return ""
    shared = {other: (prompts[file] & prompts[other]).total() for other in others}
    closest = max(others, key=shared.__getitem__)
    own, theirs = prompts[file].total(), prompts[closest].total()
    return f": of its {own} rows {closest}, which has {theirs}, shares {shared[closest]}"


def _reward(response: Response) -> float:
    if response.reward is None:
        raise UserError(
            f"{response.origin}: no reward to compare by; score the responses: `dschat generate`"
            " with --reward_model or --reward_function."
        )
    return response.reward


@dataclass(frozen=True)
class VoteSection:
    """The votes on one pair of models on one data set, all with the models in the same order."""

    models: tuple[str, str]  # names of the first and the second
    dataset: str  # its name, or empty
    votes: dict[str, list[Vote]]  # rater → one per item; judges first, then people, then the reward model


def sections_of(votes: Sequence[Vote], margin: float, dataset: str = "") -> list[VoteSection]:
    """Sorts votes into sections by the names of models and data set.

    The first vote of a section decides which model comes first; votes on the same models in the other order are turned
    round. Votes that name no data set belong to `dataset`, or to the one that other votes on the same models name; a
    UserError is raised where there are several. Where the reward model has no vote in a section, the rewards beside
    verdicts are taken; those that differ by no more than the margin are a tie.
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
                f"{FILE} {vote.file}: it names no data set, and other files compare {' and '.join(vote.models)} on "
                f"{' and '.join(named[models])}. Say with --dataset which of these it belongs to."
            )
        sections[models, home].append(vote)
    return [_section(home, given, margin) for (_, home), given in sections.items()]


def _section(dataset: str, votes: Sequence[Vote], margin: float) -> VoteSection:
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
    return VoteSection(models, dataset, {rater: _one_per_item(given) for rater, given in parts})


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
