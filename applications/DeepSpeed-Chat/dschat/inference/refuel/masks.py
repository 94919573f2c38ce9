# SPDX-License-Identifier: Apache-2.0
"""Pairs of tokens and masks from scored dialogues, with some of them held out."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dschat.common.atomic import writing
from dschat.common.journal import make_writable
from dschat.data import dialogue_pairs
from dschat.data.dialogue_pairs import read_dialogue_pair, tokenize_pairs
from dschat.data.encoding import turn_end
from dschat.data.sources import open_data
from dschat.errors import UserError
from dschat.inference.policy import locate_policy
from dschat.inference.refuel.options import MaskOptions
from dschat.inference.refuel.work import RECORD, Place, digest, in_words
from dschat.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import pyarrow

TRAIN, TEST = "train.parquet", "test.parquet"
INPUT = "--input-repo"
MOST_HELD_OUT = 10  # one pair in so many


def run_masks(options: MaskOptions) -> str:
    """Makes the pairs, writes train.parquet and test.parquet and hands them over; returns the line that sums it up.

    Raises UserError for a bad tokenizer or bad data, or a data set that is there with other settings.
    """
    place = Place.of(options)
    path = locate_policy(options.model)
    tokenizer = load_tokenizer(path, "--model", may_add_pad=True)
    end = turn_end(tokenizer)
    raws = list(open_data(options.input_repo, INPUT).train)
    settings = {
        "input-repo": f"{options.input_repo} (rows {digest(raw for _, raw in raws)})",
        "model": f"{path} (template and vocabulary {digest([tokenizer.chat_template, tokenizer.get_vocab()])})",
        "total-length": options.total_length,
        "test-rows": options.test_rows,
        "seed": options.seed,
    }
    done = place.finished([TRAIN, TEST], settings)
    if done is not None:
        return done
    tables, left_out = [], Counter[str]()
    size = dialogue_pairs.CHUNK
    for start in range(0, len(raws), size):
        pairs = [read_dialogue_pair(raw, origin, scored=True) for origin, raw in raws[start : start + size]]
        rows, reasons = tokenize_pairs(pairs, tokenizer, end, options.total_length)
        left_out += reasons
        tables.append(_table(rows))
    return _write(place, settings, tables, left_out, options)


def held_out_rows(count: int, wanted: int, seed: int) -> list[int]:
    """Which of so many pairs are held out: as many as wanted, but one in ten at most; ascending."""
    number = min(wanted, count // MOST_HELD_OUT)
    return sorted(np.random.default_rng(seed).permutation(count)[:number].tolist())


def _table(rows: Sequence[dict[str, Any]]) -> "pyarrow.Table":
    import pyarrow as pa

    messages = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    kinds = {"": messages, "_token": pa.list_(pa.int32()), "_mask": pa.list_(pa.int8()), "_reward": pa.float64()}
    schema = pa.schema([(name + part, kind) for part, kind in kinds.items() for name in ("chosen", "reject")])
    return pa.Table.from_pylist(list(rows), schema=schema)


def _write(
    place: Place,
    settings: dict[str, Any],
    tables: Sequence["pyarrow.Table"],
    left_out: Counter[str],
    options: MaskOptions,
) -> str:
    import pyarrow as pa

    whole = pa.concat_tables(tables)
    if not whole.num_rows:
        raise UserError(f"{INPUT} {options.input_repo}: no pair is left ({in_words(left_out)}).")
    held_out = held_out_rows(whole.num_rows, options.test_rows, options.seed)
    kept = np.setdiff1d(np.arange(whole.num_rows), held_out)
    out = f", {left_out.total()} left out ({in_words(left_out)})" if left_out else ""
    summary = f"{len(kept)} pairs to train on and {len(held_out)} held out{out}"
    make_writable(place.folder, f"{place.folder}")
    (place.folder / RECORD).unlink(missing_ok=True)
    if held_out:
        _write_parquet(whole.take(held_out), place.folder / TEST)
    else:
        (place.folder / TEST).unlink(missing_ok=True)
    _write_parquet(whole.take(kept), place.folder / TRAIN)
    place.record(settings, summary)
    return f"{summary}: {place.hand_over([TRAIN, *([TEST] if held_out else [])])}"


def _write_parquet(table: "pyarrow.Table", file: Path) -> None:
    """Writes a file at once; raises UserError where the place cannot be written."""
    from pyarrow import parquet

    try:
        with writing(file) as beside:
            parquet.write_table(table, beside)
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error}") from error
