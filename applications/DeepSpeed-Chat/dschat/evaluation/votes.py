# SPDX-License-Identifier: Apache-2.0
"""Votes of judges, people and reward models, and their tables by section: a pair of models on a data set.

`read_votes` reads files of verdicts, and makes verdicts of files of scored responses; `sections_of` sorts them.
results.py has the statistics of a section, comparisons.py the report.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from dschat.base.errors import UserError
from dschat.base.jsonl import iterate_rows, read_rows
from dschat.base.statistics import score_verdict
from dschat.evaluation.responses import (
    FILE_FLAG,
    KINDS,
    VERDICTS,
    Comparison,
    Response,
    Side,
    Verdict,
    compared,
    comparison_of,
    mirrored,
    model_names,
    pair_id,
    read_pairs,
    read_responses,
    require_same_scorer,
)

# Arrow strings refuse half of a surrogate pair, which a model's text may hold.
pd.set_option("mode.string_storage", "python")

REWARD_MODEL = "reward model"
OTHER_SIDE: dict[Side, Side] = {"A": "B", "B": "A"}

Order = tuple[Side, Verdict]  # the model whose response was shown first, and the verdict in this order


@dataclass(frozen=True)
class Vote:
    """A rater's verdict on an item: a prompt with a response of each of two models.

    Attributes:
        comparison: the texts, the models, the rater and the verdict.
        files: where it was read; of a reward model, the files of both models' responses.
        orders: the orders in which the responses were shown; empty where the file does not record them.
        aspects: criterion → verdict.
        rewards: of both responses; NaN if the rater is no reward model.
    """

    comparison: Comparison
    files: tuple[Path, ...]
    orders: tuple[Order, ...] = ()
    aspects: Mapping[str, Verdict] = field(default_factory=dict)
    rewards: tuple[float, float] = (math.nan, math.nan)

    @property
    def models(self) -> frozenset[str]:
        """Names of the two models, in whichever order."""
        return frozenset((self.comparison.model_a, self.comparison.model_b))

    def exchanged(self) -> "Vote":
        """The vote with the first and the second model exchanged."""
        old = self.comparison
        comparison = replace(
            old,
            response_a=old.response_b,
            response_b=old.response_a,
            model_a=old.model_b,
            model_b=old.model_a,
            verdict=mirrored(old.verdict),
        )
        orders = tuple((OTHER_SIDE[first], mirrored(verdict)) for first, verdict in self.orders)
        aspects = {name: mirrored(verdict) for name, verdict in self.aspects.items()}
        return replace(self, comparison=comparison, orders=orders, aspects=aspects, rewards=self.rewards[::-1])

    def row(self) -> dict[str, Any]:
        """Row of the table of a `VoteSection`."""
        return vars(self.comparison) | {
            "rater": _rater_name(self.comparison.kind, self.comparison.rater),
            "files": self.files,
            "orders": self.orders,
            "aspects": self.aspects,
            "reward_a": self.rewards[0],
            "reward_b": self.rewards[1],
        }


@dataclass(frozen=True)
class VoteSection:
    """Votes on one pair of models on one data set."""

    models: tuple[str, str]  # names of the first and the second model
    dataset: str  # empty if no file names it
    votes: pd.DataFrame  # `Vote.row` and the number of its `item`: judges, then people, then the reward model


def read_votes(files: Sequence[Path], margin: float) -> list[Vote]:
    """Read files of verdicts and of scored responses, distinguished by their columns; a repeated file counts once.

    Verdicts of judges and people come first, in the order of the files; then the reward model's on each two files of
    responses to the same prompts.

    Args:
        files: at least one.
        margin: rewards that differ by no more than this are a tie.

    Returns:
        Votes, whose models may be in either order and whose data set may be empty.

    Raises:
        UserError: a file is malformed, or files of responses have no rewards, those of different reward models, or no
            partner with the same prompts.
    """
    votes: list[Vote] = []
    response_files: list[Path] = []
    file_by_path = {file.resolve(): file for file in files}
    for file in file_by_path.values():
        origin, row = next(iterate_rows(file, FILE_FLAG))
        if "verdict" in row:
            votes += _read_verdicts(file)
        elif "response" in row:
            response_files.append(file)
        else:
            raise UserError(
                f"{origin}: neither a verdict (columns prompt, response_a, response_b, verdict, kind) nor a response "
                f"(prompt, response, reward); its columns are {', '.join(map(repr, row)) or 'none'}."
            )
    if response_files:
        verdicts: dict[str, Comparison] = {}
        for vote in votes:
            for comparison in (vote.comparison, vote.exchanged().comparison):
                texts = (comparison.prompt, comparison.response_a, comparison.response_b)
                verdicts[pair_id(*texts)] = comparison
        votes += _compare_rewards(response_files, margin, verdicts)
    return votes


def _read_verdicts(file: Path) -> list[Vote]:
    votes = []
    for origin, row in read_rows(file, FILE_FLAG):
        comparison = comparison_of(row, origin)
        orders = _orders_of(row, comparison.verdict, origin)
        votes.append(Vote(comparison, (file,), orders, _aspects_of(row, origin)))
    return votes


def _orders_of(row: Mapping[str, Any], verdict: Verdict, origin: str) -> tuple[Order, ...]:
    """Orders in which the responses were shown: judges write a list of them, people the model shown first."""
    orders = row.get("orders")
    if orders is None:
        return ((row["first"], verdict),) if row.get("first") in ("A", "B") else ()
    if not isinstance(orders, list) or not all(map(_is_order, orders)):
        raise UserError(
            f"{origin}: orders must be a list of objects with first (A or B) and verdict ({', '.join(VERDICTS)});"
            " correct or remove the column."
        )
    return tuple((order["first"], order["verdict"]) for order in orders)


def _is_order(order: object) -> bool:
    return isinstance(order, dict) and order.get("first") in ("A", "B") and order.get("verdict") in VERDICTS


def _aspects_of(row: Mapping[str, Any], origin: str) -> dict[str, Verdict]:
    aspects = row.get("aspects") or {}
    if not isinstance(aspects, dict) or not all(verdict in VERDICTS for verdict in aspects.values()):
        raise UserError(f"{origin}: aspects must be an object of verdicts ({', '.join(VERDICTS)}); correct the row.")
    return aspects


def _compare_rewards(files: Sequence[Path], margin: float, verdicts: Mapping[str, Comparison]) -> list[Vote]:
    """Votes of the reward model on each two files with the same prompts, of different models.

    The models are named after their files. If no verdict is on models of these names, as with files of several data
    sets, a pair has the models and data set of the verdict on its texts; `verdicts` are by `pair_id`, in both orders.
    """
    names = dict(zip(files, model_names(files), strict=True))
    votes = []
    scorers: dict[frozenset[str], dict[str, str]] = defaultdict(dict)  # of all files of two models
    judged_models = set()
    for verdict_on_pair in verdicts.values():
        judged_models.add(frozenset((verdict_on_pair.model_a, verdict_on_pair.model_b)))
    for file_a, file_b in _comparable_files(files, names):
        pairs = read_pairs(file_a, FILE_FLAG, file_b, FILE_FLAG)
        models = (names[file_a], names[file_b])
        for pair in pairs:
            scorers[frozenset(models)] |= {pair.a.origin: pair.a.scorer, pair.b.origin: pair.b.scorer}
            reward_a = _reward_of(pair.a)
            reward_b = _reward_of(pair.b)
            verdict = score_verdict(reward_a, reward_b, margin)
            comparison = compared(pair, verdict, "reward", REWARD_MODEL, models, "", {})
            judged = verdicts.get(comparison.id)
            if judged is not None and frozenset(models) not in judged_models:
                comparison = replace(
                    comparison, model_a=judged.model_a, model_b=judged.model_b, dataset=judged.dataset
                )
            votes.append(Vote(comparison, (file_a, file_b), rewards=(reward_a, reward_b)))
    for scorers_of_models in scorers.values():
        require_same_scorer(scorers_of_models)
    return votes


def _comparable_files(files: Sequence[Path], names: Mapping[Path, str]) -> list[tuple[Path, Path]]:
    """Pairs of files of different models with the same prompts; raises UserError for a file without a partner."""
    prompts: dict[Path, Counter[str]] = {}
    for file in files:
        prompts[file] = Counter(response.prompt for response in read_responses(file, FILE_FLAG))
    models = list(dict.fromkeys(names.values()))
    by_model = sorted(files, key=lambda file: models.index(names[file]))
    pairs = []
    for first, second in combinations(by_model, 2):
        if names[first] != names[second] and prompts[first] == prompts[second]:
            pairs.append((first, second))
    for file in files:
        if not any(file in pair for pair in pairs):
            raise UserError(
                f"{FILE_FLAG} {file}: no file of another model answers the same {prompts[file].total()} prompts. Give"
                " one, sampled with the same command."
            )
    return pairs


def _reward_of(response: Response) -> float:
    if response.reward is None:
        raise UserError(
            f"{response.origin}: the row has no reward to compare; score the responses: `dschat generate`"
            " with --reward_model or --reward_function."
        )
    return response.reward


def sections_of(votes: Sequence[Vote], dataset: str = "") -> list[VoteSection]:
    """Sort votes into sections by the names of models and data set.

    The first vote of a section decides which model comes first; votes on the models in the other order are exchanged.

    Args:
        votes: at least one, as from `read_votes`.
        dataset: data set of votes that do not name one; if empty, the data set of other votes on the same models.

    Raises:
        UserError: votes name no data set, and others on the same models name several; or a rater has several verdicts
            on one item.
    """
    datasets: dict[frozenset[str], list[str]] = defaultdict(list)  # those that votes on two models name
    for vote in votes:
        name = vote.comparison.dataset
        if name and name not in datasets[vote.models]:
            datasets[vote.models].append(name)

    votes_by_section: dict[tuple[frozenset[str], str], list[Vote]] = defaultdict(list)
    for vote in votes:
        name = vote.comparison.dataset or dataset or _only_dataset(vote, datasets[vote.models])
        votes_by_section[vote.models, name].append(vote)
    return [_section(name, votes_of_section) for (_, name), votes_of_section in votes_by_section.items()]


def _only_dataset(vote: Vote, candidates: Sequence[str]) -> str:
    """The data set of a vote that names none, from those that other votes on the same models name; or empty."""
    if len(candidates) > 1:
        models = f"{vote.comparison.model_a} and {vote.comparison.model_b}"
        raise UserError(
            f"{FILE_FLAG} {vote.files[0]}: it names no data set, and other files compare {models} on"
            f" {' and '.join(candidates)}. Say with --dataset which of these it belongs to."
        )
    return candidates[0] if candidates else ""


def _section(dataset: str, votes: Sequence[Vote]) -> VoteSection:
    """Votes on two models, named in the order of the first vote, as a table."""
    first = votes[0].comparison
    rows = []
    for vote in votes:
        is_in_order = vote.comparison.model_a == first.model_a
        rows.append((vote if is_in_order else vote.exchanged()).row())
    table = pd.DataFrame(rows)
    table = table.sort_values("kind", key=lambda kinds: kinds.map(KINDS.index), kind="stable")
    # Equal texts in one file are items of their own. Half of a surrogate pair is a question mark in written files.
    table["pair"] = list(map(pair_id, table["prompt"], table["response_a"], table["response_b"]))
    table["occurrence"] = table.groupby(["rater", "files", "pair"], sort=False).cumcount()
    table["item"] = table.groupby(["pair", "occurrence"], sort=False).ngroup()
    by_rater = []
    for rater, votes_of_rater in table.groupby("rater", sort=False):
        if rater == REWARD_MODEL:  # complete files and samples of them may both be given
            votes_of_rater = votes_of_rater.drop_duplicates("item")
        _require_one_verdict_per_item(str(rater), votes_of_rater)
        by_rater.append(votes_of_rater)
    return VoteSection((first.model_a, first.model_b), dataset, pd.concat(by_rater, ignore_index=True))


def _require_one_verdict_per_item(rater: str, votes: pd.DataFrame) -> None:
    """Raises UserError if a rater has voted twice on an item."""
    repeated = votes[votes.duplicated("item", keep=False)]
    if len(repeated):
        files = " and ".join(dict.fromkeys(str(file) for file, *_ in repeated["files"]))
        raise UserError(
            f"{FILE_FLAG} {files}: several verdicts of {rater} on the same responses, which would pass for more items."
            " Give each file in a report of its own, or two people of one name two names in the column rater."
        )


def _rater_name(kind: str, rater: str) -> str:
    """How tables call a rater: a blank name is that of the kind."""
    name = " ".join(rater.split()) or kind
    if kind == "reward" or name == kind:
        return name
    return f"{kind} {name}"
