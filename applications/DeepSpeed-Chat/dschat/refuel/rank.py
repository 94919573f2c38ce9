# SPDX-License-Identifier: Apache-2.0
"""Makes training pairs from dialogues: scores at the end of each turn, then tokens and masks."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from dschat.data.dialogues import Dialogue
from dschat.data.rows import in_words
from dschat.data.splits import parts_of_rows, plainly_written
from dschat.data.turn_end import turn_end
from dschat.evaluation.policy import Compute, locate_policy
from dschat.evaluation.runner import (
    BatchFunction,
    Concluded,
    Entry,
    RunPart,
    described_function,
    enough_memory,
    in_batches,
    settings_of,
)
from dschat.models.template_date import SETTING, template_date
from dschat.models.tokenizer import load_tokenizer
from dschat.refuel import dialogue_pairs
from dschat.refuel.data_options import MaskOptions, RankOptions
from dschat.refuel.datasets import RECORD, OutputLocation, digest, make_rows, open_rows
from dschat.refuel.dialogue_pairs import FINISHED, FIRST, REWARD, SECOND, read_dialogue_pair, tokenize_pairs
from dschat.refuel.token_pairs import FAILED
from dschat.scoring.reward_reader import RewardReader, encode_dialogues, load_reward_model, load_reward_tokenizer

PROMPTS = "--prompts"
FUNCTION = "--reward_function"
INPUT = "--input_repo"
TOO_LONG = "the dialogue is too long for the reward model"
REFUSED = "its chat template refuses the dialogue"
NOT_FINITE = "the reward is not finite"
NO_NUMBER = "the reward function gave no number"
AT_ONCE = 32  # rows of two dialogues that are kept together
TRAIN = "train.parquet"
TEST = "test.parquet"
MOST_HELD_OUT = 10  # at most one pair in 10 is held out

# Dialogues, and whether the last reply of each ended → numbers, or why there is none.
Score = Callable[[Sequence[Dialogue], Sequence[bool]], list[float | str]]


@dataclass(frozen=True)
class Beginning:
    """A dialogue up to one of its replies."""

    dialogue: Dialogue
    finished: bool  # whether this reply ended; else it was cut

    @property
    def key(self) -> str:
        """Equal for beginnings that are read as the same text."""
        contents = [message["content"] for message in self.dialogue]
        return "\0".join([*contents, str(self.finished)])


BothSides = dict[str, list[Beginning]]  # column FIRST and SECOND → the dialogue up to each of its replies


def run_rank(options: RankOptions) -> str:
    """Score all dialogues, write train.jsonl and hand it over; returns the line that sums it up.

    Raises:
        UserError: bad models or data, or a data set that is there with other settings.
    """
    OutputLocation(options.output).restore_date()
    flags = options.ranking
    rows: list[dict[str, Any]] = []
    sides: list[BothSides] = []
    for origin, row in open_rows(flags.prompts, PROMPTS):
        rows.append(row)
        sides.append(_both_sides(row, origin))
    scorer_settings, open_scorer = _scorer(options)

    def prepare() -> BatchFunction:
        score = open_scorer()
        return partial(_entries, sides, score, flags.batch_size)

    def conclude(entries: list[Entry]) -> Concluded:
        failures: Counter[str] = Counter()
        scored = 0
        scored_rows: list[dict[str, Any]] = []
        for row, entry in zip(rows, entries, strict=True):
            rewards = entry["rewards"]
            failures.update(entry["failures"])
            scored += sum(map(len, rewards.values()))
            scored_rows.append({**row, **rewards})
        if failures.total() == scored:
            raise UserError(f"{PROMPTS} {flags.prompts}: not one of {scored} dialogues got a reward: {failures}.")
        failed = f"; {failures.total()} failed and are {FAILED:g} ({in_words(failures)})" if failures else ""
        return scored_rows, f"{scored} rewards of {len(sides)} pairs of dialogues{failed}"

    settings = {"prompts": f"{flags.prompts} (rows {digest(rows)})"} | scorer_settings
    batches = in_batches(range(len(sides)), AT_ONCE)
    part = RunPart(batches=batches, prepare=prepare, unit="dialogue")
    return make_rows(options.output, settings, part, conclude)


def _entries(sides: Sequence[BothSides], score: Score, batch_size: int, numbers: Sequence[int]) -> list[Entry]:
    """Score both dialogues of the pairs with these numbers, at the end of each reply."""
    beginnings: list[Beginning] = []
    for number in numbers:
        for beginnings_of_side in sides[number].values():
            beginnings += beginnings_of_side
    scores = _scores_of_beginnings(beginnings, score, batch_size)

    entries: list[Entry] = []
    for number in numbers:
        failures: Counter[str] = Counter()
        rewards: dict[str, list[float]] = {}
        for column, beginnings_of_side in sides[number].items():
            rewards_of_dialogue: list[float] = []
            for beginning in beginnings_of_side:
                reward = scores[beginning.key]
                if isinstance(reward, str):
                    failures[reward] += 1
                    reward = FAILED
                rewards_of_dialogue.append(reward)
            rewards[column + REWARD] = rewards_of_dialogue
        entries.append({"number": number, "rewards": rewards, "failures": dict(failures)})
    return entries


def _scores_of_beginnings(beginnings: Sequence[Beginning], score: Score, batch_size: int) -> dict[str, float | str]:
    """Scores of the beginnings of dialogues, by their keys; a shared one is scored once."""
    by_key = {beginning.key: beginning for beginning in beginnings}

    # Texts of similar length share a batch. The longest come first, so that one too large for memory fails at once.
    order = sorted(by_key, key=len, reverse=True)
    scores: dict[str, float | str] = {}
    for start in range(0, len(order), batch_size):
        keys = order[start : start + batch_size]
        dialogues = [by_key[key].dialogue for key in keys]
        finished = [by_key[key].finished for key in keys]
        problem = f"--batch_size: the GPU's memory does not suffice for {len(keys)} dialogues"
        with enough_memory(problem, "a smaller --batch_size; what is finished stays"):
            batch_scores = score(dialogues, finished)
        scores.update(zip(keys, batch_scores, strict=True))
    return scores


def _both_sides(row: dict[str, Any], origin: str) -> BothSides:
    """The beginnings of both dialogues of a row, which ends with each reply; a row need not say which were cut.

    Raises:
        UserError: the row holds no pair of dialogues, or FINISHED is not one boolean for each reply.
    """
    pair = read_dialogue_pair(row, origin, scored=False)
    sides: BothSides = {}
    for column, dialogue in ((FIRST, pair.first), (SECOND, pair.second)):
        turns = len(dialogue) // 2
        finished = row.get(column + FINISHED)
        if finished is None:
            finished = [True] * turns
        is_list = isinstance(finished, list) and len(finished) == turns
        if not is_list or not all(isinstance(value, bool) for value in finished):
            raise UserError(
                f"{origin}: {column}{FINISHED} must be a list with true or false for each of the {turns} turns."
            )
        beginnings: list[Beginning] = []
        for turn, has_end in enumerate(finished):
            beginnings.append(Beginning(dialogue[: 2 * turn + 2], has_end))
        sides[column] = beginnings
    return sides


def _scorer(options: RankOptions) -> tuple[dict[str, Any], Callable[[], Score]]:
    """The settings that rewards depend on, by flag, and a function that opens the scorer.

    The tokenizer of a reward model is checked at once.
    """
    flags = options.ranking
    if flags.reward_function is not None:
        function = load_function(flags.reward_function, FUNCTION, ["dialogues"])
        settings = {"reward-function": described_function(flags.reward_function)}
        return settings, lambda: partial(function_scores, function)

    path = flags.reward_model or ""
    where = Compute.chosen(options.compute)
    tokenizer = load_reward_tokenizer(path, rm_template=False)
    if tokenizer.chat_template is None:
        raise UserError(
            f"--reward_model {path}: its tokenizer has no chat template, so that it cannot read dialogues. Give a "
            f"reward model whose folder holds chat_template.jinja, or {FUNCTION} module.py:function."
        )

    def open_reader() -> Score:
        with enough_memory("--reward_model: the GPU's memory does not hold it"):
            reader = load_reward_model(path, tokenizer, True, where.device, where.dtype)
        reader.shorten(flags.max_length)
        return partial(model_scores, reader)

    settings = {"reward-model": folder_stamp(path), SETTING: template_date()}
    return settings | settings_of(options, ["max_length"]) | where.settings, open_reader


def model_scores(reader: RewardReader, dialogues: Sequence[Dialogue], finished: Sequence[bool]) -> list[float | str]:
    """Scores of a reward model whose tokenizer has a chat template; or REFUSED, TOO_LONG or NOT_FINITE."""
    limit = reader.classifier.limit
    sequences, refused = encode_dialogues(reader.tokenizer, dialogues, finished, end_id=reader.trained_end_id)
    fitting = {number: ids for number, ids in sequences.items() if limit is None or len(ids) <= limit}
    numbers = reader.classifier.numbers(list(fitting.values())).tolist()
    by_dialogue = dict(zip(fitting, numbers, strict=True))
    scores: list[float | str] = []
    for number in range(len(dialogues)):
        if number in refused:
            scores.append(REFUSED)
        elif number not in by_dialogue:
            scores.append(TOO_LONG)
        else:
            score = by_dialogue[number]
            scores.append(score if math.isfinite(score) else NOT_FINITE)
    return scores


def function_scores(
    function: Callable[..., Any], dialogues: Sequence[Dialogue], finished: Sequence[bool]
) -> list[float | str]:
    """Scores of a user's function, or why there is none.

    Raises:
        UserError: the function fails or does not return one number per dialogue.
    """
    copies: list[Dialogue] = []
    for dialogue in dialogues:
        copies.append([dict(message) for message in dialogue])
    returned = call_function(function, FUNCTION, copies)
    try:
        numbers = []
        for value in returned:
            numbers.append(None if value is None else float(value))
    except (TypeError, ValueError) as error:
        raise UserError(f"{FUNCTION}: the function returned {type(returned).__name__}, no list of numbers.") from error
    if len(numbers) != len(dialogues):
        raise UserError(
            f"{FUNCTION}: the function returned {len(numbers)} numbers for {len(dialogues)} dialogues; it must return "
            "one for each, or None if there is none."
        )

    scores: list[float | str] = []
    for number in numbers:
        if number is None:
            scores.append(NO_NUMBER)
        elif not math.isfinite(number):
            scores.append(NOT_FINITE)
        else:
            scores.append(number)
    return scores


def run_masks(options: MaskOptions) -> str:
    """Make the pairs, write train.parquet and test.parquet and hand them over; returns the line that sums it up.

    Raises:
        UserError: a bad tokenizer or bad data, or a data set that is there with other settings.
    """
    location = OutputLocation(options.output)
    location.restore_date()
    flags = options.pairs
    path = locate_policy(flags.model)
    tokenizer = load_tokenizer(path, "--model")
    end = turn_end(tokenizer)
    raws = list(open_rows(flags.input_repo, INPUT))
    input_digest = digest(raw for _, raw in raws)
    settings = {
        "input-repo": f"{flags.input_repo} (rows {input_digest})",
        "model": f"{path} (template and vocabulary {digest([tokenizer.chat_template, tokenizer.get_vocab()])})",
        SETTING: template_date(),
    }
    settings |= settings_of(options, ("total_length", "test_rows", "seed"))
    summary = location.hand_over_finished([TRAIN, TEST], settings)
    if summary is not None:
        return summary

    tables: list[pa.Table] = []
    left_out: Counter[str] = Counter()
    size = dialogue_pairs.CHUNK
    for start in range(0, len(raws), size):
        pairs = []
        for origin, raw in raws[start : start + size]:
            pairs.append(read_dialogue_pair(raw, origin, scored=True))
        rows, reasons = tokenize_pairs(pairs, tokenizer, end, flags.total_length)
        left_out += reasons
        tables.append(_table(rows))
    return _write(pa.concat_tables(tables), left_out, settings, options)


def held_out_rows(openings: Sequence[str], wanted: int, seed: int) -> list[int]:
    """Numbers of the held-out pairs in ascending order: about the requested number, but at most one in ten.

    Pairs whose dialogues have the same `openings`, up to white space, are held out together.
    """
    count = len(openings)
    number = min(wanted, count // MOST_HELD_OUT)
    order = np.random.default_rng(seed).permutation(count)
    openings = [plainly_written(opening) for opening in openings]
    parts = parts_of_rows(openings, (0, number, count), order)
    rows: list[int] = np.flatnonzero(parts == 0).tolist()
    return rows


def _table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Pairs as a table: of both sides the messages, then tokens, masks and rewards."""
    text = pa.string()
    message = pa.struct([("role", text), ("content", text)])
    type_by_suffix = {
        "": pa.list_(message),
        "_token": pa.list_(pa.int32()),
        "_mask": pa.list_(pa.int8()),
        "_reward": pa.float64(),
    }
    columns = []
    for suffix, column_type in type_by_suffix.items():
        columns.append(("chosen" + suffix, column_type))
        columns.append(("reject" + suffix, column_type))
    return pa.Table.from_pylist(list(rows), schema=pa.schema(columns))


def _write(pairs: pa.Table, left_out: Counter[str], settings: dict[str, Any], options: MaskOptions) -> str:
    """Write both parts of the pairs and hand them over; the record is written last, so that a kill leaves none."""
    location = OutputLocation(options.output)
    if not pairs.num_rows:
        raise UserError(f"{INPUT} {options.pairs.input_repo}: no pair is left ({in_words(left_out)}).")
    openings = [messages[0]["content"] for messages in pairs.column("chosen").to_pylist()]
    test_rows = held_out_rows(openings, options.pairs.test_rows, options.pairs.seed)
    train_rows = np.setdiff1d(np.arange(pairs.num_rows), test_rows)
    reasons = f", {left_out.total()} left out ({in_words(left_out)})" if left_out else ""
    summary = f"{len(train_rows)} pairs to train on and {len(test_rows)} held out{reasons}"

    make_writable(location.folder, f"{location.folder}")
    (location.folder / RECORD).unlink(missing_ok=True)
    for name, rows in ((TEST, test_rows), (TRAIN, train_rows)):
        file = location.folder / name
        if not len(rows):
            file.unlink(missing_ok=True)
            continue
        with reporting(str(file)), writing(file) as temporary:
            parquet.write_table(pairs.take(rows), temporary)
    location.record(settings, summary)
    files = [TRAIN, TEST] if test_rows else [TRAIN]
    return f"{summary}: {location.hand_over(files)}"
