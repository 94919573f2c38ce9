# SPDX-License-Identifier: Apache-2.0
"""What a report counts: votes, one per row of a file of verdicts or per pair of scored responses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from dschat.common.jsonl import read_rows
from dschat.common.statistics import score_verdict
from dschat.errors import UserError
from dschat.evaluation.pairs.comparisons import VERDICTS, Kind, comparison_of, mirrored
from dschat.evaluation.pairs.responses import Pair, model_names, read_pairs, read_responses

FLAG = "FILE"  # how messages name the files, which come without a flag
REWARD_MODEL = "reward model"


class Item(NamedTuple):
    """What is compared: the responses of two models to a prompt. Equal texts count by their occurrence in a file."""

    prompt: str
    response_a: str
    response_b: str
    occurrence: int = 0

    def mirrored(self) -> Item:
        """The same with the models exchanged."""
        return self._replace(response_a=self.response_b, response_b=self.response_a)


class Showing(NamedTuple):
    """One order in which the responses were shown: whose stood first, and the verdict in terms of the models."""

    first: str
    verdict: str


@dataclass(frozen=True)
class Vote:
    """A verdict on an item.

    Attributes:
        item: what was judged.
        verdict: A, B, tie, invalid or skip.
        kind: judge, human or reward.
        rater: name of the judge model or person.
        models: names of the first and the second model.
        dataset: its name, or empty.
        file: where it was read.
        showings: the orders behind the verdict; empty where the row does not tell.
        rewards: the reward model's scores of both responses, where they are known.
        aspects: criterion → verdict, where the judge gave one for each.
        turned: whether the models stand here the other way round than in the file.
    """

    item: Item
    verdict: str
    kind: Kind
    rater: str
    models: tuple[str, str]
    dataset: str
    file: Path
    showings: tuple[Showing, ...] = ()
    rewards: tuple[float, float] | None = None
    aspects: Mapping[str, str] = field(default_factory=dict)
    turned: bool = False

    def mirrored(self) -> Vote:
        """The same vote with the models exchanged."""
        return replace(
            self,
            item=self.item.mirrored(),
            verdict=mirrored(self.verdict),
            models=(self.models[1], self.models[0]),
            showings=tuple(Showing(mirrored(s.first), mirrored(s.verdict)) for s in self.showings),
            rewards=None if self.rewards is None else (self.rewards[1], self.rewards[0]),
            aspects={name: mirrored(verdict) for name, verdict in self.aspects.items()},
            turned=not self.turned,
        )


def read_votes(files: Sequence[Path], margin: float) -> tuple[list[Vote], list[list[Vote]]]:
    """Reads files of verdicts and of responses, told apart by their columns.

    Args:
        files: JSON Lines files; one given twice counts once.
        margin: rewards that differ by no more are a tie.

    Returns:
        The votes of all files of verdicts; and for each two files that answer the same prompts the reward model's.

    Raises:
        UserError: a file is missing, of neither kind, or bad; files of responses do not fit together or lack rewards.
    """
    votes: list[Vote] = []
    responses: list[Path] = []
    for file in {file.resolve(): file for file in files}.values():
        origin, row = read_rows(file, FLAG)[0]
        if "verdict" in row:
            votes += _verdicts(file)
        elif "response" in row:
            responses.append(file)
        else:
            raise UserError(
                f"{origin}: neither a verdict (columns prompt, response_a, response_b, verdict, kind) nor a response "
                f"(prompt, response, reward); its columns are {', '.join(map(repr, row)) or 'none'}."
            )
    return votes, _scored(responses, margin)


def reward_vote(item: Item, rewards: tuple[float, float], models: tuple[str, str], file: Path, margin: float) -> Vote:
    """The reward model's vote on an item."""
    return Vote(
        item=item,
        verdict=score_verdict(*rewards, margin),
        kind="reward",
        rater=REWARD_MODEL,
        models=models,
        dataset="",
        file=file,
        rewards=rewards,
    )


def _verdicts(file: Path) -> list[Vote]:
    seen: Counter[Any] = Counter()
    votes = []
    for origin, row in read_rows(file, FLAG):
        one = comparison_of(row, origin)
        texts = (one.prompt, one.response_a, one.response_b)
        key = (*texts, one.kind, one.rater, one.model_a, one.model_b)
        vote = Vote(
            item=Item(*texts, seen[key]),
            verdict=one.verdict,
            kind=one.kind,
            rater=one.rater,
            models=(one.model_a, one.model_b),
            dataset=one.dataset,
            file=file,
            showings=_showings(one.details, one.verdict, origin),
            rewards=_rewards(one.details, origin),
            aspects=_aspects(one.details, origin),
        )
        seen[key] += 1
        votes.append(vote)
    return votes


def _showings(details: Mapping[str, Any], verdict: str, origin: str) -> tuple[Showing, ...]:
    if details.get("orders") is None:
        return (Showing(details["first"], verdict),) if details.get("first") in ("A", "B") else ()
    orders = details["orders"]
    if not isinstance(orders, list) or not all(_is_order(order) for order in orders):
        raise UserError(
            f"{origin}: orders must be a list of objects with first (A or B) and verdict ({', '.join(VERDICTS)}); "
            "correct or remove the column."
        )
    return tuple(Showing(order["first"], order["verdict"]) for order in orders)


def _rewards(details: Mapping[str, Any], origin: str) -> tuple[float, float] | None:
    rewards = [details.get(name) for name in ("reward_a", "reward_b")]
    if None in rewards:
        return None
    for reward in rewards:
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(
                f"{origin}: reward_a and reward_b must be finite numbers, not {reward!r}; correct the row."
            )
    return float(rewards[0]), float(rewards[1])  # type: ignore[arg-type]


def _aspects(details: Mapping[str, Any], origin: str) -> dict[str, str]:
    aspects = details.get("aspects") or {}
    if not isinstance(aspects, dict) or not all(verdict in VERDICTS for verdict in aspects.values()):
        raise UserError(f"{origin}: aspects must be an object of verdicts ({', '.join(VERDICTS)}); correct the row.")
    return aspects


def _is_order(order: Any) -> bool:
    return isinstance(order, dict) and order.get("first") in ("A", "B") and order.get("verdict") in VERDICTS


def _scored(files: Sequence[Path], margin: float) -> list[list[Vote]]:
    """The reward model's votes on each two files with the same prompts, of different models."""
    if len(files) == 1:
        raise UserError(f"{FLAG} {files[0]}: responses of one model alone; give the file of the other model as well.")
    names = dict(zip(files, model_names(files), strict=True))
    prompts = {file: Counter(response.prompt for response in read_responses(file, FLAG)) for file in files}
    couples = [pair for pair in combinations(files, 2) if names[pair[0]] != names[pair[1]]]
    equal = [pair for pair in couples if prompts[pair[0]] == prompts[pair[1]]]
    for file in files:
        if not any(file in pair for pair in equal):
            _no_partner(file, prompts)
    votes: list[list[Vote]] = []
    for first, second in sorted(equal, key=lambda pair: -prompts[pair[0]].total()):
        pairs = read_pairs(first, FLAG, second, FLAG)
        found = [_reward_vote(pair, (names[first], names[second]), first, margin) for pair in pairs]
        items = _numbered(found)
        if not any(_same_models(items, before) and _items(items) <= _items(before) for before in votes):
            votes.append(items)
    return votes


def _no_partner(file: Path, prompts: Mapping[Path, Counter[str]]) -> None:
    """Raises the error that names what does not fit."""
    others = [other for other in prompts if other != file]
    nearest = max(others, key=lambda other: (prompts[other] & prompts[file]).total())
    read_pairs(file, FLAG, nearest, FLAG)
    raise UserError(f"{FLAG} {file} and {nearest} are responses of the same model; give the other model's as well.")


def _reward_vote(pair: Pair, models: tuple[str, str], file: Path, margin: float) -> Vote:
    for response in (pair.a, pair.b):
        if response.reward is None:
            raise UserError(f"{response.origin}: no reward to compare by; score the responses with a reward model.")
    rewards = (float(pair.a.reward or 0.0), float(pair.b.reward or 0.0))
    return reward_vote(Item(pair.prompt, pair.a.response, pair.b.response), rewards, models, file, margin)


def _numbered(votes: Sequence[Vote]) -> list[Vote]:
    """The same with equal items numbered by occurrence."""
    seen: Counter[Item] = Counter()
    numbered = []
    for vote in votes:
        numbered.append(replace(vote, item=vote.item._replace(occurrence=seen[vote.item])))
        seen[vote.item] += 1
    return numbered


def _items(votes: Sequence[Vote]) -> set[Item]:
    return {vote.item for vote in votes}


def _same_models(votes: Sequence[Vote], others: Sequence[Vote]) -> bool:
    return votes[0].models == others[0].models
