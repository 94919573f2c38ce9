# SPDX-License-Identifier: Apache-2.0
"""Pairs of tokenized replies, which REFUEL trains on; `dschat.refuel.dialogue_pairs` makes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat.base.errors import UserError
from dschat.data.examples import PreferenceExample
from dschat.data.loading import StepData
from dschat.data.rows import in_words
from dschat.data.sources import described, in_proportion, open_data, require_training_rows

FAILED = -99999.0  # reward of a dialogue that could not be scored
NOT_SCORED = "a turn could not be scored"  # a reason why a pair is left out
FLAG = "--task.query_dataset"
TOO_LONG = "longer than --task.total_length"
TOKEN_COLUMNS = ("chosen_token", "chosen_mask", "chosen_reward", "reject_token", "reject_mask", "reject_reward")


@dataclass(frozen=True, kw_only=True)
class RegressionExample(PreferenceExample):
    """Two replies to one state with their rewards-to-go; the chosen reply's is at least as high as the other's."""

    chosen_reward: float
    rejected_reward: float


def load_regression_data(names: Sequence[str], max_seq_len: int, vocabulary: int) -> StepData[RegressionExample]:
    """Reads pairs that `dschat refuel-data tokenize` wrote.

    Args:
        names: local folders or files, or data sets of the hub.
        max_seq_len: maximum tokens of state and reply together; longer pairs are dropped.
        vocabulary: number of ids that the tokenizer has.

    Raises:
        UserError: a row is not such a pair, or no pair is left.
    """
    train: list[RegressionExample] = []
    held_out: list[list[RegressionExample]] = []
    sources: list[dict[str, Any]] = []
    files: list[Path] = []
    dropped = {"train": Counter[str](), "eval": Counter[str]()}
    for name in names:
        raw = open_data(name, FLAG)
        rows = list(require_training_rows(raw, name))
        eval_rows = list(raw.eval or ())
        source_train = _examples(rows, max_seq_len, vocabulary, dropped["train"])
        source_eval = _examples(eval_rows, max_seq_len, vocabulary, dropped["eval"])
        train += source_train
        held_out.append(source_eval)
        files += raw.files
        num_rows = (len(rows), len(eval_rows))
        counts = (len(source_train), len(source_eval))
        sources.append(described(raw.name, *counts, {}, num_rows, hub=raw.hub, names=raw.splits))
    if not train:
        raise UserError(
            f"{FLAG} {' '.join(names)}: no training pair is left ({in_words(dropped['train']) or 'there is none'}). "
            "Give a larger --task.total_length, or other data."
        )
    return StepData(train, in_proportion(held_out), sources, tuple(files), dropped)


def _examples(
    rows: Iterable[tuple[str, Any]], max_seq_len: int, vocabulary: int, dropped: Counter[str]
) -> list[RegressionExample]:
    """Examples of rows (origin, row); counts those that are dropped, by reason."""
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
    """The example of a row. Raises UserError if the row is not a pair of replies to one state."""
    require_columns(raw, TOKEN_COLUMNS, origin, "tokenize")
    prompt, chosen = _split(raw["chosen_token"], raw["chosen_mask"], origin)
    rejected_prompt, rejected = _split(raw["reject_token"], raw["reject_mask"], origin)
    if prompt != rejected_prompt:
        raise UserError(f"{origin}: the two sequences differ before their replies; both must answer the same state.")
    highest = max(max(prompt), max(chosen), max(rejected))
    if highest >= vocabulary:
        raise UserError(
            f"{origin}: token id {highest} is not below the model's {vocabulary} ids: the pairs were made for another"
            " model. Make them again: `dschat refuel-data tokenize` with this run's --base_model as --model."
        )
    chosen_reward = raw["chosen_reward"]
    rejected_reward = raw["reject_reward"]
    for reward in (chosen_reward, rejected_reward):
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(f"{origin}: the rewards {chosen_reward!r} and {rejected_reward!r} must be numbers.")
    return RegressionExample(
        prompt, chosen, rejected, chosen_reward=float(chosen_reward), rejected_reward=float(rejected_reward)
    )


def _split(tokens: list[int], mask: list[int], origin: str) -> tuple[list[int], list[int]]:
    """Splits a sequence into state and reply.

    Raises:
        UserError: the mask is not a single run of ones after at least one zero.
    """
    start = mask.index(1) if 1 in mask else 0
    stop = start + sum(mask)
    if len(tokens) != len(mask) or start == 0 or mask[start:stop] != [1] * sum(mask):
        raise UserError(f"{origin}: a mask must be 1 on the tokens of one reply after other tokens, and 0 elsewhere.")
    return tokens[:start], tokens[start:stop]


def require_columns(raw: Any, columns: Sequence[str], origin: str, command: str) -> None:
    """Raises UserError if a row lacks a column.

    Args:
        raw: the row, column → value.
        columns: the required columns.
        origin: file and row, for the message.
        command: of `dschat refuel-data`, which makes such rows, for the message.
    """
    present = raw if isinstance(raw, dict) else {}
    missing = [name for name in columns if present.get(name) is None]
    if missing:
        names = ", ".join(map(repr, missing))
        raise UserError(f"{origin}: no column {names}; give a data set that `dschat refuel-data {command}` makes.")
