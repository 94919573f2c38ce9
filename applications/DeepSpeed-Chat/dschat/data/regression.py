# SPDX-License-Identifier: Apache-2.0
"""REFUEL's pairs as a run reads them: two replies to one state as token ids, each with its reward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.data.dialogue_pairs import FAILED, NOT_SCORED
from dschat.data.places import open_data
from dschat.data.preferences import PreferenceExample
from dschat.errors import UserError

FLAG = "--task.query_dataset"
TOO_LONG = "longer than --task.total_length"
COLUMNS = tuple(f"{name}_{part}" for name in ("chosen", "reject") for part in ("token", "mask", "reward"))


@dataclass(frozen=True, kw_only=True)
class RegressionExample(PreferenceExample):
    """Two replies to a state, of which the chosen one has the higher reward, or one as high.

    Attributes:
        chosen_reward, rejected_reward: rewards-to-go.
    """

    chosen_reward: float
    rejected_reward: float


@dataclass(frozen=True)
class RegressionData:
    """The pairs of a run, and what run.json says of them.

    Attributes:
        train, eval: pairs.
        sources: per data set its name, rows and what was left out.
        files: local files, in order.
        dropped: by split, reason → number of rows left out.
    """

    train: list[RegressionExample] = field(repr=False)
    eval: list[RegressionExample] = field(repr=False)
    sources: list[dict[str, Any]]
    files: tuple[Path, ...]
    dropped: dict[str, Counter[str]]


def load_regression_data(
    names: Sequence[str], max_seq_len: int, vocabulary: int, start: int = 0, end: int = -1
) -> RegressionData:
    """Reads what tokenize_masks.py wrote.

    Args:
        names: folders here, files, or data sets of the hub.
        max_seq_len: most tokens of state and reply together; longer pairs are left out.
        vocabulary: number of ids that the tokenizer has.
        start, end: training rows of all data sets together, from 0, the end excluded; −1 = all.

    Raises:
        UserError: a row is no such pair, or none is left.
    """
    train: list[RegressionExample] = []
    held_out: list[RegressionExample] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    dropped = {"train": Counter[str](), "eval": Counter[str]()}
    number = 0
    for name in names:
        raw = open_data(name, FLAG)
        rows = []
        for row in raw.train:
            if number >= start and (end == -1 or number < end):
                rows.append(row)
            number += 1
        own = _examples(rows, max_seq_len, vocabulary, dropped["train"])
        own_eval = _examples(raw.eval or (), max_seq_len, vocabulary, dropped["eval"])
        train, held_out = train + own, held_out + own_eval
        described = {"name": raw.name, "train": len(own), "eval": len(own_eval), "dropped": {}}
        sources.append(described | ({"hub": raw.hub} if raw.hub else {}))
        files += raw.files
    if not train:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in dropped["train"].items())
        raise UserError(
            f"{FLAG} {' '.join(names)}: no training pair is left of {number} ({reasons or 'none in that range'}). "
            "Give a larger --task.total_length, another range of --start_idx and --end_idx, or other data."
        )
    return RegressionData(train, held_out, sources, tuple(files), dropped)


def _examples(
    rows: Iterable[tuple[str, Any]], max_seq_len: int, vocabulary: int, dropped: Counter[str]
) -> list[RegressionExample]:
    examples = []
    for origin, raw in rows:
        example = _example(raw, origin, vocabulary)
        if FAILED in (example.chosen_reward, example.rejected_reward):
            dropped[NOT_SCORED] += 1
        elif len(example) > max_seq_len:
            dropped[TOO_LONG] += 1
        else:
            examples.append(example)
    return examples


def _example(raw: Any, origin: str, vocabulary: int) -> RegressionExample:
    missing = [name for name in COLUMNS if not isinstance(raw, dict) or raw.get(name) is None]
    if missing:
        names = ", ".join(map(repr, missing))
        raise UserError(f"{origin}: no column {names}; give a data set that tokenize_masks.py makes.")
    prompt, chosen = _split(raw["chosen_token"], raw["chosen_mask"], origin)
    other, rejected = _split(raw["reject_token"], raw["reject_mask"], origin)
    if prompt != other:
        raise UserError(f"{origin}: the two sequences differ before their replies; both must answer the same state.")
    highest = max(max(prompt), max(chosen), max(rejected))
    if highest >= vocabulary:
        raise UserError(
            f"{origin}: token {highest} is none of the model's {vocabulary}: the pairs were made for another model. "
            "Make them with tokenize_masks.py and --model as --base_model is."
        )
    rewards = (raw["chosen_reward"], raw["reject_reward"])
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in rewards):
        raise UserError(f"{origin}: the rewards {rewards[0]!r} and {rewards[1]!r} must be numbers.")
    better, worse = map(float, rewards)
    return RegressionExample(prompt, chosen, rejected, chosen_reward=better, rejected_reward=worse)


def _split(tokens: list[int], mask: list[int], origin: str) -> tuple[list[int], list[int]]:
    """State and reply; raises UserError where the mask is not one run of ones behind at least one other token."""
    first = mask.index(1) if 1 in mask else 0
    count = sum(mask)
    if len(tokens) != len(mask) or not first or mask[first : first + count] != [1] * count:
        raise UserError(f"{origin}: a mask must be 1 on the tokens of one reply behind others, and 0 elsewhere.")
    return tokens[:first], tokens[first : first + count]
