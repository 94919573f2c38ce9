# SPDX-License-Identifier: Apache-2.0
"""Votes of judges, people and reward models as a table, sorted into sections: a pair of models on a data set."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd

from dschat.base.errors import UserError
from dschat.base.jsonl import iterate_rows, read_rows
from dschat.base.statistics import score_verdict
from dschat.evaluation.responses import (
    FILE,
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
    read_pairs,
    read_responses,
    require_same_scorer,
)

# Arrow strings refuse half of a surrogate pair, which a model's text may hold.
pd.set_option("mode.string_storage", "python")

REWARD_MODEL = "reward model"
# Columns that identify a judged item: equal texts are distinguished by their occurrence in a file.
ITEM = ["prompt", "response_a", "response_b", "occurrence"]
RATER = ["kind", "rater", "model_a", "model_b"]
OTHER_SIDE: dict[Side, Side] = {"A": "B", "B": "A"}

Order = tuple[Side, Verdict]  # the model whose response was shown first, and the verdict in this order
Vote = dict[str, Any]  # see `read_votes`


@dataclass(frozen=True)
class VoteSection:
    """Votes on one pair of models on one data set."""

    models: tuple[str, str]  # names of the first and the second model
    dataset: str  # empty if no file names it
    votes: pd.DataFrame  # a `Vote` per rater and `item` (its number): judges, then people, then the reward model


def read_votes(files: Sequence[Path], margin: float) -> list[Vote]:
    """Read files of verdicts and of scored responses, distinguished by their columns; a repeated file counts once.

    Verdicts of judges and people come first, in the order of the files; then the reward model's on each two files of
    responses to the same prompts.

    Args:
        files: at least one.
        margin: rewards that differ by no more than this are a tie.

    Returns:
        Votes. `prompt`, `response_a`, `response_b` and `occurrence` identify the item; `kind`, `rater`, `model_a` and
        `model_b` the rater. `verdict` is in terms of the models; `orders` is a tuple of `Order`, empty where the file
        does not record them; `aspects` maps a criterion to its verdict. `reward_a` and `reward_b` are the reward
        model's alone. `dataset` may be empty, and `file` is where the vote was read.

    Raises:
        UserError: a file is malformed, or files of responses have no rewards, those of different reward models, or no
            partner with the same prompts.
    """
    votes: list[Vote] = []
    response_files: list[Path] = []
    file_by_path = dict(zip(map(Path.resolve, files), files, strict=True))
    for file in file_by_path.values():
        origin, row = next(iterate_rows(file, FILE))
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
        votes += _compare_rewards(response_files, margin)
    return votes


def _read_verdicts(file: Path) -> list[Vote]:
    votes = []
    occurrences: Counter[tuple[str, ...]] = Counter()
    for origin, row in read_rows(file, FILE):
        comparison = comparison_of(row, origin)
        orders = _orders_of(row, comparison.verdict, origin)
        aspects = _aspects_of(row, origin)
        votes.append(_vote(comparison, file, occurrences, orders=orders, aspects=aspects))
    return votes


def _vote(comparison: Comparison, file: Path, occurrences: Counter[tuple[str, ...]], **columns: Any) -> Vote:
    """The vote of a comparison in a file, whose earlier votes `occurrences` counts by their texts and rater."""
    vote = vars(comparison) | columns
    key = itemgetter(*ITEM[:3], *RATER)(vote)
    vote |= {"file": file, "occurrence": occurrences[key]}
    occurrences[key] += 1
    return vote


def _orders_of(row: Mapping[str, Any], verdict: Verdict, origin: str) -> tuple[Order, ...]:
    """Orders in which the responses were shown: judges write a list of them, people the model shown first."""
    orders = row.get("orders")
    if orders is None and row.get("first") in ("A", "B"):
        return ((row["first"], verdict),)
    if orders is None:
        return ()
    problem = f"{origin}: orders must be a list of objects with first (A or B) and verdict ({', '.join(VERDICTS)})"
    if not isinstance(orders, list):
        raise UserError(f"{problem}; correct or remove the column.")
    shown: list[Order] = []
    for order in orders:
        if not isinstance(order, dict) or order.get("first") not in ("A", "B") or order.get("verdict") not in VERDICTS:
            raise UserError(f"{problem}; correct or remove the column.")
        shown.append((order["first"], order["verdict"]))
    return tuple(shown)


def _aspects_of(row: Mapping[str, Any], origin: str) -> dict[str, Verdict]:
    aspects = row.get("aspects") or {}
    if not isinstance(aspects, dict) or not all(verdict in VERDICTS for verdict in aspects.values()):
        raise UserError(f"{origin}: aspects must be an object of verdicts ({', '.join(VERDICTS)}); correct the row.")
    return aspects


def _compare_rewards(files: Sequence[Path], margin: float) -> list[Vote]:
    """Votes of the reward model on each two files with the same prompts, of different models.

    An item counts once for two models, even if both their complete files and samples of them are given.
    """
    names = dict(zip(files, model_names(files), strict=True))
    votes: dict[tuple[str, ...], Vote] = {}
    for file_a, file_b in _comparable_files(files, names):
        pairs = read_pairs(file_a, FILE, file_b, FILE)
        scorers: dict[str, str] = {}
        for pair in pairs:
            scorers[pair.a.origin] = pair.a.scorer
            scorers[pair.b.origin] = pair.b.scorer
        require_same_scorer(scorers)
        models = (names[file_a], names[file_b])
        occurrences: Counter[tuple[str, ...]] = Counter()
        for pair in pairs:
            reward_a = _reward_of(pair.a)
            reward_b = _reward_of(pair.b)
            verdict = score_verdict(reward_a, reward_b, margin)
            comparison = compared(pair, verdict, "reward", REWARD_MODEL, models, "", {})
            rewards = {"reward_a": reward_a, "reward_b": reward_b}
            vote = _vote(comparison, file_a, occurrences, orders=(), aspects={}, **rewards)
            votes.setdefault(itemgetter(*ITEM, *RATER)(vote), vote)
    return list(votes.values())


def _comparable_files(files: Sequence[Path], names: Mapping[Path, str]) -> list[tuple[Path, Path]]:
    """Pairs of files of different models with the same prompts; raises UserError for a file without a partner."""
    prompts: dict[Path, Counter[str]] = {}
    for file in files:
        prompts[file] = Counter(response.prompt for response in read_responses(file, FILE))
    models = list(dict.fromkeys(names.values()))
    by_model = sorted(files, key=lambda file: models.index(names[file]))
    pairs = []
    for first, second in combinations(by_model, 2):
        if names[first] != names[second] and prompts[first] == prompts[second]:
            pairs.append((first, second))
    for file in files:
        if not any(file in pair for pair in pairs):
            raise UserError(
                f"{FILE} {file}: no file of another model answers the same {prompts[file].total()} prompts. Give one,"
                " sampled with the same command, seed and --split-seed."
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
        models = frozenset((vote["model_a"], vote["model_b"]))
        if vote["dataset"] and vote["dataset"] not in datasets[models]:
            datasets[models].append(vote["dataset"])

    votes_by_section: dict[tuple[frozenset[str], str], list[Vote]] = defaultdict(list)
    for vote in votes:
        models = frozenset((vote["model_a"], vote["model_b"]))
        name = vote["dataset"] or dataset or _only_dataset(vote, datasets[models])
        votes_by_section[models, name].append(vote)
    return [_section(name, votes_of_section) for (_, name), votes_of_section in votes_by_section.items()]


def _only_dataset(vote: Vote, candidates: Sequence[str]) -> str:
    """The data set of a vote that names none, from those that other votes on the same models name; or empty."""
    if len(candidates) > 1:
        raise UserError(
            f"{FILE} {vote['file']}: it names no data set, and other files compare {vote['model_a']} and "
            f"{vote['model_b']} on {' and '.join(candidates)}. Say with --dataset which of these it belongs to."
        )
    return candidates[0] if candidates else ""


def _section(dataset: str, votes: Sequence[Vote]) -> VoteSection:
    models = (votes[0]["model_a"], votes[0]["model_b"])
    rows = []
    for vote in votes:
        row = vote if vote["model_a"] == models[0] else exchange_models(vote)
        rows.append(row | {"rater": _rater_name(vote["kind"], vote["rater"])})
    table = pd.DataFrame(rows)
    table = table.sort_values("kind", key=lambda kinds: kinds.map(KINDS.index), kind="stable")
    table["item"] = table.groupby(ITEM, sort=False).ngroup()
    by_rater = []
    for rater, votes_of_rater in table.groupby("rater", sort=False):
        repeated = votes_of_rater[votes_of_rater.duplicated("item", keep=False)]
        if len(repeated):
            files = " and ".join(dict.fromkeys(map(str, repeated["file"])))
            raise UserError(
                f"{FILE} {files}: several verdicts of {rater} on the same responses, which would pass for more items."
                " Give each file in a report of its own, or two people of one name two names in the column rater."
            )
        by_rater.append(votes_of_rater)
    return VoteSection(models, dataset, pd.concat(by_rater, ignore_index=True))


def exchange_models(vote: Vote) -> Vote:
    """A vote with the first and the second model exchanged."""
    exchanged = dict(vote)
    for name in ("response", "model", "reward"):
        if f"{name}_a" in vote:
            exchanged[f"{name}_a"] = vote[f"{name}_b"]
            exchanged[f"{name}_b"] = vote[f"{name}_a"]
    exchanged["verdict"] = mirrored(vote["verdict"])
    orders: list[Order] = []
    for first, verdict in vote["orders"]:
        orders.append((OTHER_SIDE[first], mirrored(verdict)))
    exchanged["orders"] = tuple(orders)
    exchanged["aspects"] = {}
    for name, verdict in vote["aspects"].items():
        exchanged["aspects"][name] = mirrored(verdict)
    return exchanged


def _rater_name(kind: str, rater: str) -> str:
    """How tables call a rater."""
    name = " ".join(rater.split())
    return name if kind in ("reward", name) else f"{kind} {name}"
