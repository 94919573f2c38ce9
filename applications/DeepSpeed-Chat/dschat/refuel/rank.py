# SPDX-License-Identifier: Apache-2.0
"""Makes training pairs from dialogues: scores at the end of each turn, then tokens and masks."""

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
from dschat.base.journal import require_writable
from dschat.data.dialogues import Dialogue
from dschat.data.rows import Row, in_words
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
from dschat.refuel.data_options import MaskOptions, RankOptions
from dschat.refuel.datasets import RECORD, OutputLocation, digest, make_rows, open_rows
from dschat.refuel.dialogue_pairs import FIRST, REWARD, SECOND, read_dialogue_pair, tokenize_pairs
from dschat.refuel.scores import DialogueScores, function_scores, reward_model_scores
from dschat.refuel.token_pairs import FAILED
from dschat.scoring.reward_tokenizer import load_reward_tokenizer

PROMPTS = "--prompts"
INPUT = "--input_repo"
AT_ONCE = 32  # rows of two dialogues that are kept together
CHUNK = 500  # pairs that are tokenized together
TRAIN = "train.parquet"
TEST = "test.parquet"
MOST_HELD_OUT = 10  # at most one pair in 10 is held out


@dataclass(frozen=True)
class Beginning:
    """A dialogue up to one of its replies."""

    dialogue: Dialogue
    finished: bool  # whether this reply ended; else it was cut
    row: Row

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for beginnings of a row that are read as the same text."""
        return (self.row.origin, *(message["content"] for message in self.dialogue), self.finished)


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
        return partial(_entries, sides, open_scorer())

    def conclude(entries: list[Entry]) -> Concluded:
        scored_rows: list[dict[str, Any]] = []
        rewards: list[float] = []
        for row, entry in zip(rows, entries, strict=True):
            scored_rows.append({**row, **entry["rewards"]})
            for rewards_of_dialogue in entry["rewards"].values():
                rewards += rewards_of_dialogue
        failures = rewards.count(FAILED)
        if failures == len(rewards):
            raise UserError(f"{PROMPTS} {flags.prompts}: not one of {failures} dialogues got a finite reward.")
        failed = f"; {failures} failed and are {FAILED:g}" if failures else ""
        return scored_rows, f"{len(rewards)} rewards of {len(sides)} pairs of dialogues{failed}"

    settings = {"prompts": f"{flags.prompts} (rows {digest(rows)})"} | scorer_settings
    batches = in_batches(range(len(sides)), AT_ONCE)
    part = RunPart(batches=batches, prepare=prepare, unit="dialogue")
    return make_rows(options.output, settings, part, conclude)


def _entries(sides: Sequence[BothSides], score: DialogueScores, numbers: Sequence[int]) -> list[Entry]:
    """Score both dialogues of the pairs with these numbers at the end of each reply; a shared beginning once."""
    by_key: dict[tuple[object, ...], Beginning] = {}
    for number in numbers:
        for beginnings in sides[number].values():
            by_key |= {beginning.key: beginning for beginning in beginnings}
    remedy = "a smaller --batch_size; what is finished stays"
    with enough_memory("--batch_size: the GPU's memory does not suffice", remedy):
        scores = score(
            [beginning.dialogue for beginning in by_key.values()],
            [beginning.row for beginning in by_key.values()],
            [beginning.finished for beginning in by_key.values()],
        )
    rewards = dict(zip(by_key, scores.nan_to_num(FAILED, FAILED, FAILED).tolist(), strict=True))

    entries: list[Entry] = []
    for number in numbers:
        columns = {}
        for column, beginnings in sides[number].items():
            columns[column + REWARD] = [rewards[beginning.key] for beginning in beginnings]
        entries.append({"number": number, "rewards": columns})
    return entries


def _both_sides(row: dict[str, Any], origin: str) -> BothSides:
    """The beginnings of both dialogues of a row, which ends with each reply; a row need not say which were cut.

    Raises:
        UserError: the row holds no pair of dialogues.
    """
    pair = read_dialogue_pair(row, origin, scored=False)
    data_row = Row(None, None, None, None, row, origin)
    sides: BothSides = {}
    pairs = ((FIRST, pair.first, pair.first_finished), (SECOND, pair.second, pair.second_finished))
    for column, dialogue, finished in pairs:
        beginnings: list[Beginning] = []
        for turn, has_end in enumerate(finished):
            beginnings.append(Beginning(dialogue[: 2 * turn + 2], has_end, data_row))
        sides[column] = beginnings
    return sides


def _scorer(options: RankOptions) -> tuple[dict[str, Any], Callable[[], DialogueScores]]:
    """The settings that rewards depend on, by flag, and a function that opens the scorer.

    A function, and the tokenizer of a reward model, are opened at once.
    """
    flags = options.ranking
    if flags.reward_function is not None:
        scores = function_scores(flags.reward_function)
        return {"reward-function": described_function(flags.reward_function)}, lambda: scores

    path = flags.reward_model or ""
    where = Compute.chosen(options.compute)
    tokenizer = load_reward_tokenizer(path, rm_template=False)

    def open_reward_model() -> DialogueScores:
        with enough_memory("--reward_model: the GPU's memory does not hold it"):
            return reward_model_scores(
                path, tokenizer, where.dtype, where.device, flags.batch_size, max_length=flags.max_length, skips=True
            )

    settings = {"reward-model": folder_stamp(path), SETTING: template_date()}
    return settings | settings_of(options, ["max_length"]) | where.settings, open_reward_model


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
    settings |= settings_of(options, ("total_length", "test_rows"))
    summary = location.publish_finished([TRAIN, TEST], settings)
    if summary is not None:
        return summary

    tables: list[pa.Table] = []
    left_out: Counter[str] = Counter()
    for start in range(0, len(raws), CHUNK):
        pairs = []
        for origin, raw in raws[start : start + CHUNK]:
            pairs.append(read_dialogue_pair(raw, origin, scored=True))
        rows, reasons = tokenize_pairs(pairs, tokenizer, end, flags.total_length)
        left_out += reasons
        tables.append(_table(rows))
    return _write(pa.concat_tables(tables), left_out, settings, options)


def held_out_rows(openings: Sequence[str], wanted: int) -> list[int]:
    """Numbers of the held-out pairs in ascending order: about the requested number, but at most one in ten.

    Pairs whose dialogues have the same `openings`, up to white space, are held out together.
    """
    count = len(openings)
    number = min(wanted, count // MOST_HELD_OUT)
    order = np.random.default_rng(0).permutation(count)  # in every run the same
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
    """Write both parts of the pairs and publish them; the record is written last, so that a kill leaves none."""
    location = OutputLocation(options.output)
    if not pairs.num_rows:
        raise UserError(f"{INPUT} {options.pairs.input_repo}: no pair is left ({in_words(left_out)}).")
    openings = [messages[0]["content"] for messages in pairs.column("chosen").to_pylist()]
    test_rows = held_out_rows(openings, options.pairs.test_rows)
    train_rows = np.setdiff1d(np.arange(pairs.num_rows), test_rows)
    reasons = f", {left_out.total()} left out ({in_words(left_out)})" if left_out else ""
    summary = f"{len(train_rows)} pairs to train on and {len(test_rows)} held out{reasons}"

    require_writable(location.folder, f"{location.folder}")
    (location.folder / RECORD).unlink(missing_ok=True)
    for name, rows in ((TEST, test_rows), (TRAIN, train_rows)):
        file = location.folder / name
        if not len(rows):
            file.unlink(missing_ok=True)
            continue
        with reporting(str(file)), writing(file) as temporary:
            parquet.write_table(pairs.take(rows), temporary)
    location.record(settings, summary)
    if test_rows:
        return f"{summary}: {location.publish([TRAIN, TEST])}"
    # Rows that an earlier data set held out may be trained on now.
    return f"{summary}: {location.publish([TRAIN], gone=[TEST])}"
