# SPDX-License-Identifier: Apache-2.0
"""Votes of judges, people and reward models as a table, sorted into sections: a pair of models on a data set."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
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
    Response,
    Side,
    Verdict,
    combined,
    comparison_of,
    mirrored,
    model_names,
    read_pairs,
    read_responses,
    require_same_scorer,
)
from dschat.evaluation.table import object_column

REWARD_MODEL = "reward model"
TEXTS = ["prompt", "response_a", "response_b"]
# Columns that identify a judged item: equal texts are distinguished by their occurrence in a file.
ITEM = [*TEXTS, "occurrence"]
RATER = ["kind", "rater", "model_a", "model_b"]
COMPARISON = [*TEXTS, "verdict", *RATER, "dataset"]
OTHER_SIDE: dict[Side, Side] = {"A": "B", "B": "A"}

Order = tuple[Side, Verdict]  # the model whose response was shown first, and the verdict in this order


@dataclass(frozen=True)
class VoteSection:
    """Votes on one pair of models on one data set."""

    models: tuple[str, str]  # names of the first and the second model
    dataset: str  # empty if no file names it
    votes: pd.DataFrame  # see `read_votes`; one per rater and item: judges, then people, then the reward model


def read_votes(files: Sequence[Path], margin: float) -> pd.DataFrame:
    """Read files of verdicts and of scored responses, distinguished by their columns; a repeated file counts once.

    Verdicts of judges and people come first, in the order of the files; then the reward model's on each two files of
    responses to the same prompts.

    Args:
        files: at least one.
        margin: rewards that differ by no more than this are a tie.

    Returns:
        One vote per row. `prompt`, `response_a`, `response_b` and `occurrence` identify the item; `kind`, `rater`,
        `model_a` and `model_b` the rater. `verdict` is in terms of the models; `orders` is a tuple of `Order`, empty
        where the file does not record them; `aspects` maps a criterion to its verdict. `reward_a` and `reward_b` are
        the reward model's alone. `dataset` may be empty, `file` is where the vote was read, and `turned` says
        whether the models have been exchanged since.

    Raises:
        UserError: a file is malformed, or files of responses have no rewards, those of different reward models, or no
            partner with the same prompts.
    """
    tables: list[pd.DataFrame] = []
    response_files: list[Path] = []
    file_by_path = dict(zip(map(Path.resolve, files), files, strict=True))
    for file in file_by_path.values():
        origin, row = next(iterate_rows(file, FILE))
        if "verdict" in row:
            tables.append(_read_verdicts(file))
        elif "response" in row:
            response_files.append(file)
        else:
            raise UserError(
                f"{origin}: neither a verdict (columns prompt, response_a, response_b, verdict, kind) nor a response "
                f"(prompt, response, reward); its columns are {', '.join(map(repr, row)) or 'none'}."
            )
    if response_files:
        tables.append(_compare_rewards(response_files, margin))
    return pd.concat(tables, ignore_index=True)


def _read_verdicts(file: Path) -> pd.DataFrame:
    rows = []
    for origin, row in read_rows(file, FILE):
        comparison = comparison_of(row, origin)
        vote: dict[str, Any] = {}
        for name in COMPARISON:
            vote[name] = getattr(comparison, name)
        vote["orders"] = _orders_of(row, comparison.verdict, origin)
        vote["aspects"] = _aspects_of(row, origin)
        rows.append(vote)
    votes = pd.DataFrame(rows)
    votes["occurrence"] = votes.groupby([*TEXTS, *RATER]).cumcount()
    votes["file"] = file
    votes["turned"] = False
    return votes


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


def _compare_rewards(files: Sequence[Path], margin: float) -> pd.DataFrame:
    """Votes of the reward model on each two files with the same prompts, of different models.

    An item counts once for two models, even if both their complete files and samples of them are given.
    """
    names = dict(zip(files, model_names(files), strict=True))
    rows: list[dict[str, Any]] = []
    for file_a, file_b in _comparable_files(files, names):
        pairs = read_pairs(file_a, FILE, file_b, FILE)
        scorers: dict[str, str] = {}
        for pair in pairs:
            scorers[pair.a.origin] = pair.a.scorer
            scorers[pair.b.origin] = pair.b.scorer
        require_same_scorer(scorers)
        for pair in pairs:
            reward_a = _reward_of(pair.a)
            reward_b = _reward_of(pair.b)
            row = {
                "prompt": pair.prompt,
                "response_a": pair.a.response,
                "response_b": pair.b.response,
                "verdict": score_verdict(reward_a, reward_b, margin),
                "kind": "reward",
                "rater": REWARD_MODEL,
                "model_a": names[file_a],
                "model_b": names[file_b],
                "dataset": "",
                "orders": (),
                "aspects": {},
                "reward_a": reward_a,
                "reward_b": reward_b,
                "file": file_a,
            }
            rows.append(row)
    votes = pd.DataFrame(rows)
    votes["occurrence"] = votes.groupby([*TEXTS, "file", "model_a", "model_b"]).cumcount()
    votes["turned"] = False
    return votes.drop_duplicates([*ITEM, "model_a", "model_b"])


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


def sections_of(votes: pd.DataFrame, dataset: str = "") -> list[VoteSection]:
    """Sort votes into sections by the names of models and data set.

    The first vote of a section decides which model comes first; votes on the models in the other order are exchanged.

    Args:
        votes: rows as `read_votes` returns them.
        dataset: data set of votes that do not name one; if empty, the data set of other votes on the same models.

    Raises:
        UserError: votes name no data set, and others on the same models name several.
    """
    votes = votes.copy()
    models = zip(votes["model_a"], votes["model_b"], strict=True)
    votes["models"] = object_column(votes, list(map(frozenset, models)))
    votes["dataset"] = _datasets_of(votes, dataset)
    sections = []
    for (_, name), section in votes.groupby(["models", "dataset"], sort=False):
        sections.append(_section(str(name), section.drop(columns="models")))
    return sections


def _datasets_of(votes: pd.DataFrame, dataset: str) -> list[str]:
    """(N,) name of each vote's data set, see `sections_of`."""
    named: dict[frozenset[str], list[str]] = defaultdict(list)
    for models, name in zip(votes["models"], votes["dataset"], strict=True):
        if name and name not in named[models]:
            named[models].append(name)
    datasets = []
    for vote in votes[["models", "model_a", "model_b", "dataset", "file"]].itertuples():
        candidates = named[vote.models]
        name = vote.dataset or dataset
        if not name and len(candidates) > 1:
            raise UserError(
                f"{FILE} {vote.file}: it names no data set, and other files compare {vote.model_a} and {vote.model_b} "
                f"on {' and '.join(candidates)}. Say with --dataset which of these it belongs to."
            )
        if not name and candidates:
            name = candidates[0]
        datasets.append(name)
    return datasets


def _section(dataset: str, votes: pd.DataFrame) -> VoteSection:
    models = (votes["model_a"].iloc[0], votes["model_b"].iloc[0])
    same_order = votes["model_a"] == models[0]
    exchanged = exchange_models(votes[~same_order])
    votes = pd.concat([votes[same_order], exchanged]).sort_index()

    votes = votes.sort_values("kind", key=lambda kinds: kinds.map(KINDS.index), kind="stable")
    votes["item"] = votes.groupby(ITEM, sort=False).ngroup()
    votes["rater"] = list(map(_rater_name, votes["kind"], votes["rater"]))
    merged = []
    for rater, votes_of_rater in votes.groupby("rater", sort=False):
        repeated = votes_of_rater[votes_of_rater.duplicated(["item", "turned"], keep=False)]
        if len(repeated):
            files = " and ".join(dict.fromkeys(map(str, repeated["file"])))
            raise UserError(
                f"{FILE} {files}: several verdicts of {rater} on the same responses, which would pass for more items."
                " Give each file in a report of its own, or two people of one name two names in the column rater."
            )
        merged.append(_merge_orders(votes_of_rater))
    return VoteSection(models, dataset, pd.concat(merged, ignore_index=True))


def exchange_models(votes: pd.DataFrame) -> pd.DataFrame:
    """Votes with the first and the second model exchanged."""
    swapped = {}
    for name in ("response", "model", "reward"):
        swapped[f"{name}_a"] = f"{name}_b"
        swapped[f"{name}_b"] = f"{name}_a"
    exchanged = votes.rename(columns=swapped)
    exchanged["verdict"] = list(map(mirrored, votes["verdict"]))
    exchanged["orders"] = votes["orders"].map(_exchange_orders)
    exchanged["aspects"] = votes["aspects"].map(_exchange_aspects)
    exchanged["turned"] = ~votes["turned"]
    return exchanged


def _exchange_orders(orders: tuple[Order, ...]) -> tuple[Order, ...]:
    exchanged: list[Order] = []
    for first, verdict in orders:
        exchanged.append((OTHER_SIDE[first], mirrored(verdict)))
    return tuple(exchanged)


def _exchange_aspects(aspects: Mapping[str, Verdict]) -> dict[str, Verdict]:
    return {name: mirrored(verdict) for name, verdict in aspects.items()}


def _rater_name(kind: str, rater: str) -> str:
    """How tables call a rater."""
    name = " ".join(rater.split())
    return name if kind in ("reward", name) else f"{kind} {name}"


def _merge_orders(votes: pd.DataFrame) -> pd.DataFrame:
    """One vote per item: verdicts of one rater in files of opposite model order count as a judge's two orders."""
    if votes["item"].is_unique:
        return votes
    votes_by_item: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for vote in votes.to_dict("records"):
        votes_by_item[vote["item"]].append(vote)
    merged = []
    for same_item in votes_by_item.values():
        verdicts: list[Verdict] = []
        orders: list[Order] = []
        verdicts_by_aspect: dict[str, list[Verdict]] = defaultdict(list)
        for vote in same_item:
            verdicts.append(vote["verdict"])
            orders += vote["orders"]
            for name, verdict in vote["aspects"].items():
                verdicts_by_aspect[name].append(verdict)
        aspects = {}
        for name, aspect_verdicts in verdicts_by_aspect.items():
            if len(aspect_verdicts) == len(same_item):  # every vote has a verdict on this criterion
                aspects[name] = combined(aspect_verdicts)
        merged_vote = {"verdict": combined(verdicts), "orders": tuple(orders), "aspects": aspects}
        merged.append(same_item[0] | merged_vote)
    return pd.DataFrame(merged)
