# SPDX-License-Identifier: Apache-2.0
"""What a report counts: votes, one per row of a file of verdicts or per pair of scored responses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from dschat.common.jsonl import read_rows
from dschat.common.statistics import score_verdict
from dschat.errors import UserError
from dschat.evaluation.pairs.comparisons import VERDICTS, Kind, Side, Verdict, comparison_of, mirrored
from dschat.evaluation.pairs.responses import Response, model_names, number_of, read_pairs, read_responses

FLAG = "FILE"  # how messages name the files, which come without a flag
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
    for origin, row in read_rows(file, FLAG):
        one = comparison_of(row, origin)
        texts, models = (one.prompt, one.response_a, one.response_b), (one.model_a, one.model_b)
        key = (*texts, one.kind, one.rater, *models)
        rewards = (number_of(row, "reward_a", origin), number_of(row, "reward_b", origin))
        vote = Vote(
            item=JudgedItem(*texts, occurred[key]),
            verdict=one.verdict,
            kind=one.kind,
            rater=one.rater,
            models=models,
            dataset=one.dataset,
            file=file,
            showings=_showings(row, one.verdict, origin),
            rewards=None if rewards[0] is None or rewards[1] is None else (rewards[0], rewards[1]),
            aspects=_aspects(row, origin),
        )
        occurred[key] += 1
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
    prompts = {file: Counter(response.prompt for response in read_responses(file, FLAG)) for file in files}
    models = list(dict.fromkeys(names.values()))
    couples = [
        (one, other)
        for one, other in combinations(sorted(files, key=lambda file: models.index(names[file])), 2)
        if names[one] != names[other] and prompts[one] == prompts[other]
    ]
    for file in files:
        if not any(file in couple for couple in couples):
            remedy = "Give one, sampled with the same command and seed"
            raise UserError(f"{FLAG} {file}: no file of another model answers the same prompts. {remedy}.")
    votes: dict[tuple[tuple[str, str], JudgedItem], Vote] = {}
    for first, second in couples:
        both = (names[first], names[second])
        occurred: Counter[tuple[str, str, str]] = Counter()
        for pair in read_pairs(first, FLAG, second, FLAG):
            texts = (pair.prompt, pair.a.response, pair.b.response)
            item = JudgedItem(*texts, occurred[texts])
            occurred[texts] += 1
            rewards = (_reward(pair.a), _reward(pair.b))
            votes.setdefault((both, item), reward_vote(item, rewards, both, first, margin))
    return list(votes.values())


def _reward(response: Response) -> float:
    if response.reward is None:
        raise UserError(f"{response.origin}: no reward to compare by; score the responses with a reward model.")
    return response.reward
