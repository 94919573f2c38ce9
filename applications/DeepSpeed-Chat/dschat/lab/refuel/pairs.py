# SPDX-License-Identifier: Apache-2.0
"""From dialogues to pairs that are trained on: a score at the end of each turn, then tokens and masks."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from dschat.base.atomic import reporting, writing
from dschat.base.errors import UserError
from dschat.base.fingerprints import folder_stamp
from dschat.base.journal import make_writable
from dschat.base.user_function import call_function, load_function
from dschat.data import dialogue_pairs
from dschat.data.dialogue_pairs import (
    FAILED,
    FIRST,
    REWARD,
    SECOND,
    DialoguePair,
    read_dialogue_pair,
    tokenize_pairs,
)
from dschat.data.dialogues import Dialogue
from dschat.data.encoding import turn_end
from dschat.data.rows import in_words
from dschat.data.sources import open_data
from dschat.lab.policy import Compute, locate_policy
from dschat.lab.refuel.datasets import RECORD, Place, described_function, digest, make_rows
from dschat.lab.refuel.options import MaskOptions, RankOptions
from dschat.lab.runner import BatchFunction, Concluded, Entry, RunPart, enough_memory, in_batches, settings_of
from dschat.models.template_date import SETTING, template_date
from dschat.models.tokenizer import load_tokenizer
from dschat.scoring.reward_reader import NOT_FINITE, load_reward_model, load_reward_tokenizer

PROMPTS, FUNCTION, INPUT = "--prompts", "--reward_function", "--input_repo"
NO_NUMBER = "the reward function gave no number"
AT_ONCE = 32  # rows of two dialogues that are kept together
TRAIN, TEST = "train.parquet", "test.parquet"
MOST_HELD_OUT = 10  # one pair in so many

Score = Callable[[Sequence[Dialogue]], list[float | str]]  # numbers, or why there is none


def run_rank(options: RankOptions) -> str:
    """Scores all dialogues, writes train.jsonl and hands it over; returns the line that sums it up.

    Raises UserError for bad models or data, or a data set that is there with other settings.
    """
    Place(options).go_on_with_date()
    raws = list(open_data(options.prompts, PROMPTS).train)
    pairs = [read_dialogue_pair(raw, origin, scored=False) for origin, raw in raws]
    scorer_settings, open_scorer = _scorer(options)
    settings = {"prompts": f"{options.prompts} (rows {digest(raw for _, raw in raws)})"} | scorer_settings

    def prepare() -> BatchFunction:
        score = open_scorer()
        return lambda numbers: _entries([pairs[n] for n in numbers], numbers, score, options.batch_size)

    def conclude(entries: list[Entry]) -> Concluded:
        failures = sum((Counter(entry["failures"]) for entry in entries), Counter[str]())
        scored = sum(len(numbers) for entry in entries for numbers in entry["rewards"].values())
        if failures.total() == scored:
            raise UserError(f"{PROMPTS} {options.prompts}: not one of {scored} dialogues got a reward: {failures}.")
        failed = f", of which {failures.total()} failed and are {FAILED:g} ({in_words(failures)})" if failures else ""
        rows = [{**raw, **entry["rewards"]} for (_, raw), entry in zip(raws, entries, strict=True)]
        return rows, f"{scored} rewards of {len(pairs)} pairs of dialogues{failed}"

    part = RunPart(batches=in_batches(range(len(pairs)), AT_ONCE), prepare=prepare, unit="dialogue")
    return make_rows(options, settings, part, conclude)


def _entries(pairs: Sequence[DialoguePair], numbers: Sequence[int], score: Score, batch_size: int) -> list[Entry]:
    """Scores every beginning of both dialogues of each pair that ends with a reply; what both share, once."""
    beginnings: dict[str, Dialogue] = {}
    for pair in pairs:
        for dialogue in (pair.first, pair.second):
            for end in range(2, len(dialogue) + 1, 2):
                beginnings.setdefault(_key(dialogue[:end]), dialogue[:end])
    # Texts of like length together, the longest first: what does not fit into memory fails at once.
    order = sorted(beginnings, key=len, reverse=True)
    found: dict[str, float | str] = {}
    for start in range(0, len(order), batch_size):
        keys = order[start : start + batch_size]
        problem = f"--batch_size: the GPU's memory does not suffice for {len(keys)} dialogues"
        with enough_memory(problem, "a smaller --batch_size; what is finished stays"):
            found.update(zip(keys, score([beginnings[key] for key in keys]), strict=True))
    entries: list[Entry] = []
    for number, pair in zip(numbers, pairs, strict=True):
        rewards: dict[str, list[float]] = {}
        failures: Counter[str] = Counter()
        for column, dialogue in ((FIRST, pair.first), (SECOND, pair.second)):
            scores = [found[_key(dialogue[:end])] for end in range(2, len(dialogue) + 1, 2)]
            failures.update(x for x in scores if isinstance(x, str))
            rewards[column + REWARD] = [FAILED if isinstance(x, str) else x for x in scores]
        entries.append({"number": number, "rewards": rewards, "failures": dict(failures)})
    return entries


def _key(dialogue: Dialogue) -> str:
    return "\0".join(message["content"] for message in dialogue)


def _scorer(options: RankOptions) -> tuple[dict[str, Any], Callable[[], Score]]:
    """What the rewards depend on, by flag, and what opens the reward model, whose tokenizer is looked at at once."""
    if options.reward_function is not None:
        function = load_function(options.reward_function, FUNCTION)
        settings = {"reward-function": described_function(options.reward_function)}
        return settings, lambda: partial(function_scores, function)
    path, where = options.reward_model or "", Compute.chosen(options)
    tokenizer = load_reward_tokenizer(path, rm_template=False)
    if tokenizer.chat_template is None:
        raise UserError(
            f"--reward_model {path}: its tokenizer has no chat template, so that it cannot read dialogues. Give a "
            f"reward model whose folder holds chat_template.jinja, or {FUNCTION} module.py:function."
        )

    def opened() -> Score:
        with enough_memory("--reward_model: the GPU's memory does not hold it"):
            reader = load_reward_model(path, tokenizer, True, where.device, where.dtype)
        return lambda dialogues: reader.score_dialogues(dialogues, options.max_length)

    settings = {"reward-model": folder_stamp(path), SETTING: template_date()}
    return settings | settings_of(options, ["max_length"]) | where.settings, opened


def function_scores(function: Callable[..., Any], dialogues: Sequence[Dialogue]) -> list[float | str]:
    """What somebody's function says of dialogues; raises UserError where it fails or returns something else."""
    found = call_function(function, FUNCTION, [[dict(message) for message in dialogue] for dialogue in dialogues])
    try:
        numbers = [None if x is None else float(x) for x in found]
    except (TypeError, ValueError) as error:
        raise UserError(f"{FUNCTION}: the function returned {type(found).__name__}, no list of numbers.") from error
    if len(numbers) != len(dialogues):
        raise UserError(
            f"{FUNCTION}: the function returned {len(numbers)} numbers for {len(dialogues)} dialogues; it must return "
            "one for each, or None where there is none."
        )
    return [NO_NUMBER if x is None else x if math.isfinite(x) else NOT_FINITE for x in numbers]


def run_masks(options: MaskOptions) -> str:
    """Makes the pairs, writes train.parquet and test.parquet and hands them over; returns the line that sums it up.

    Raises UserError for a bad tokenizer or bad data, or a data set that is there with other settings.
    """
    Place(options).go_on_with_date()
    path = locate_policy(options.model)
    tokenizer = load_tokenizer(path, "--model")
    end = turn_end(tokenizer)
    raws = list(open_data(options.input_repo, INPUT).train)
    settings = {
        "input-repo": f"{options.input_repo} (rows {digest(raw for _, raw in raws)})",
        "model": f"{path} (template and vocabulary {digest([tokenizer.chat_template, tokenizer.get_vocab()])})",
        SETTING: template_date(),
    }
    settings |= settings_of(options, ("total_length", "test_rows", "seed"))
    done = Place(options).finished([TRAIN, TEST], settings)
    if done is not None:
        return done
    tables, left_out = [], Counter[str]()
    size = dialogue_pairs.CHUNK
    for start in range(0, len(raws), size):
        pairs = [read_dialogue_pair(raw, origin, scored=True) for origin, raw in raws[start : start + size]]
        rows, reasons = tokenize_pairs(pairs, tokenizer, end, options.total_length)
        left_out += reasons
        tables.append(_table(rows))
    return _write(pa.concat_tables(tables), left_out, settings, options)


def held_out_rows(count: int, wanted: int, seed: int) -> list[int]:
    """Which of so many pairs are held out: as many as wanted, but one in ten at most; ascending."""
    number = min(wanted, count // MOST_HELD_OUT)
    return sorted(np.random.default_rng(seed).permutation(count)[:number].tolist())


def _table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    kinds = {"": messages, "_token": pa.list_(pa.int32()), "_mask": pa.list_(pa.int8()), "_reward": pa.float64()}
    schema = pa.schema([(name + part, kind) for part, kind in kinds.items() for name in ("chosen", "reject")])
    return pa.Table.from_pylist(list(rows), schema=schema)


def _write(whole: pa.Table, left_out: Counter[str], settings: dict[str, Any], options: MaskOptions) -> str:
    """Writes both parts of the pairs, so that a kill leaves no data set that passes for finished; hands them over."""
    place = Place(options)
    if not whole.num_rows:
        raise UserError(f"{INPUT} {options.input_repo}: no pair is left ({in_words(left_out)}).")
    held_out = held_out_rows(whole.num_rows, options.test_rows, options.seed)
    kept = np.setdiff1d(np.arange(whole.num_rows), held_out)
    out = f", {left_out.total()} left out ({in_words(left_out)})" if left_out else ""
    summary = f"{len(kept)} pairs to train on and {len(held_out)} held out{out}"
    make_writable(place.folder, f"{place.folder}")
    (place.folder / RECORD).unlink(missing_ok=True)
    for name, rows in ((TEST, held_out), (TRAIN, kept)):
        file = place.folder / name
        if not len(rows):
            file.unlink(missing_ok=True)
            continue
        with reporting(str(file)), writing(file) as beside:
            parquet.write_table(whole.take(rows), beside)
    place.record(settings, summary)
    return f"{summary}: {place.hand_over([TRAIN, *([TEST] if held_out else [])])}"
