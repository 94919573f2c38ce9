# SPDX-License-Identifier: Apache-2.0
"""Rows → examples in Arrow tables, encoded by one or several processes.

A table has a column for every field of the example's dataclass, one for the examples' lengths in tokens, and one for
the reason why a row gives no example. Fields whose type is not in ARROW_TYPES (log-probs that are computed later) keep
their defaults. Tables that are kept between runs are in the cache, see `dschat.data.loading`.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Protocol, TypeVar, get_args, get_type_hints, overload

import numpy as np
import pyarrow as pa

from dschat.base.progress import is_interactive
from dschat.data.rows import Row, is_plain

LENGTH = "tokens"  # column of the examples' lengths
REASON = "left_out"  # column that says why a row gives no example; null where it gives one
ARROW_TYPES: dict[object, pa.DataType] = {
    list[int]: pa.list_(pa.int32()),
    list[bool]: pa.list_(pa.bool_()),
    list[str]: pa.list_(pa.string()),
    str: pa.large_string(),
    int: pa.int64(),
    bool: pa.bool_(),
    float: pa.float64(),
    Row: pa.large_string(),  # as JSON
}
ROW = "row"  # column of the rows to encode, pickled
BATCH = 500  # rows that are encoded together
MOST_WORKERS = 32
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's and DeepSpeed's names for the ranks of a machine
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends
FEW = 5_000_000  # characters of text up to which one process is as fast as several

E = TypeVar("E")  # a dataclass
E_co = TypeVar("E_co", covariant=True)
Json = dict[str, Any]


class NotStorable(Exception):
    """A row holds a value that JSON would change: a date, bytes, a key that is not text."""


class MakeExamples(Protocol[E_co]):
    """A function of `dschat.data.examples` whose other arguments are bound: rows → examples, and dropped rows."""

    def __call__(self, rows: Sequence[Any], *, held_out: bool) -> tuple[Sequence[E_co], Counter[str]]: ...


class Examples(Sequence[E], Generic[E]):
    """The examples of a table. Each is built when it is read, from a file that is mapped into memory."""

    def __init__(self, kind: type[E], table: pa.Table, row_numbers: Sequence[int] | None = None) -> None:
        """Examples of a table: those at `row_numbers`, or all."""
        if row_numbers is None:
            has_example = table[REASON].is_null().to_numpy()
            row_numbers = np.flatnonzero(has_example).tolist()
        self._kind = kind
        self._table = table
        self._fields = stored_fields(kind)
        self._row_numbers = row_numbers

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._row_numbers)

    @overload
    def __getitem__(self, index: int) -> E: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[E]: ...

    def __getitem__(self, index: int | slice) -> E | Sequence[E]:
        """An example, or the examples of a slice."""
        if isinstance(index, slice):
            return Examples(self._kind, self._table, self._row_numbers[index])
        row_number = self._row_numbers[index]
        values = {}
        for name, hint in self._fields.items():
            values[name] = self._value(name, hint, row_number)
        return self._kind(**values)

    def _value(self, name: str, hint: object, row_number: int) -> Any:
        scalar = self._table[name][row_number]
        if not scalar.is_valid:
            return None
        if hint in (list[int], list[bool]):
            return scalar.values.to_numpy(zero_copy_only=False).tolist()
        if hint is Row:
            return row_of(scalar.as_py())
        return scalar.as_py()

    @property
    def lengths(self) -> list[int]:
        """Lengths of all examples in tokens; no example is built."""
        lengths = self._table[LENGTH].to_numpy()
        return list(lengths[self._row_numbers].tolist())


def lengths_of(examples: Sequence[Any]) -> list[int]:
    """Lengths of all examples in tokens."""
    if isinstance(examples, Examples):
        return examples.lengths
    return [len(example) for example in examples]


def open_table(kind: type, files: Sequence[Path]) -> pa.Table:
    """The table of a kind of example in Arrow files, mapped into memory. Raises OSError or ValueError if damaged."""
    tables = []
    for file in files:
        stream = pa.ipc.open_stream(pa.memory_map(str(file)))
        tables.append(stream.read_all())
    return pa.concat_tables(tables) if tables else schema_of(kind).empty_table()


def stored_fields(kind: type) -> dict[str, object]:
    """The fields of an example that a table holds, with their types; X for `X | None`.

    Raises:
        NotStorable: a field without default has a type that is not in ARROW_TYPES.
    """
    hints = get_type_hints(kind)
    stored = {}
    for field in fields(kind):
        hint = hints[field.name]
        options = [option for option in get_args(hint) if option is not NoneType]
        if NoneType in get_args(hint) and len(options) == 1:
            hint = options[0]
        if hint in ARROW_TYPES:
            stored[field.name] = hint
        elif field.default is MISSING:
            raise NotStorable(f"{kind.__name__}.{field.name}")
    return stored


def schema_of(kind: type) -> pa.Schema:
    """The columns of a table of such examples. Raises NotStorable, see `stored_fields`."""
    columns = {LENGTH: pa.int64(), REASON: pa.string()}
    for name, hint in stored_fields(kind).items():
        columns[name] = ARROW_TYPES[hint]
    return pa.schema(columns)


def table_of(kind: type[E], examples: Sequence[E], reasons: Sequence[str] = (), start: int = 0) -> pa.Table:
    """Examples as a table, followed by a row for each reason why a row gave no example.

    `start` is added to the examples' field `index`, if they have one.

    Raises:
        NotStorable: a row of the data cannot be kept.
    """
    missing = [None] * len(reasons)
    lengths = [len(example) for example in examples]  # type: ignore[arg-type]
    columns: dict[str, list[Any]] = {LENGTH: lengths + missing, REASON: [None] * len(examples) + list(reasons)}
    for name, hint in stored_fields(kind).items():
        values = [getattr(example, name) for example in examples]
        if hint is Row:
            values = [row_text(row) for row in values]
        elif name == "index":
            values = [start + number for number in values]
        columns[name] = values + missing
    return pa.table(columns, schema=schema_of(kind))


def row_text(row: Row) -> str:
    """A row as JSON, from which `row_of` makes an equal one.

    Raises:
        NotStorable: it holds a value that JSON would change.
    """
    contents = (row.extra, row.messages, row.chosen_message, row.rejected_message, row.template_arguments)
    if not all(is_plain(content) for content in contents):
        raise NotStorable(row.origin)
    return json.dumps(vars(row), check_circular=False)


def row_of(text: str) -> Row:
    """The row that `row_text` wrote."""
    return Row(**json.loads(text))


def num_workers() -> int:
    """Worker processes that this process may start: its cores, shared with the other ranks of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    local_ranks = next(filter(None, map(os.environ.get, LOCAL_SIZES)), "1")
    return max(1, min(MOST_WORKERS, cores // int(local_ranks)))


def workers_for(rows: Sequence[Any]) -> int | None:
    """Processes that shorten the encoding of rows; None where it is finished before others have started."""
    characters = 0
    for row in rows:
        for text in (row.prompt, row.chosen, row.rejected):
            characters += len(text or "")
    workers = num_workers()
    return workers if characters >= FEW and workers > 1 else None


def encode_rows(
    kind: type[E], make: MakeExamples[E], rows: Sequence[Any], title: str, file: Path | None = None
) -> tuple[Examples[E], Counter[str]]:
    """Encodes rows by `datasets.Dataset.map`; the result does not depend on the number of processes.

    Args:
        kind: kind of the examples.
        make: makes examples of rows.
        rows: rows of the data, or examples of a prepared folder.
        title: title of the progress bar, which is shown on terminals.
        file: Arrow file to write the table to, or several with a number before the suffix, one for each process;
            None = the table stays in memory.

    Returns:
        The examples in the order of the rows, and reason → number of rows without an example.

    Raises:
        UserError: raised by `make`.
        NotStorable: a row that an example holds cannot be kept.
        OSError: `file` cannot be written.
    """
    import datasets
    from datasets.table import InMemoryTable

    schema = schema_of(kind)
    if not rows:
        return Examples(kind, schema.empty_table()), Counter()
    if not is_interactive():
        datasets.disable_progress_bars()
    # Pickles, since rows may hold any value; they stay in memory.
    pickled_rows = pa.array(map(pickle.dumps, rows), pa.large_binary())
    table = InMemoryTable(pa.table({ROW: pickled_rows}))
    source = datasets.Dataset(table).with_format("arrow")
    with _ending_with_this_process():
        encoded = source.map(
            _encode_batch,
            with_indices=True,
            batched=True,
            batch_size=BATCH,
            keep_in_memory=file is None,
            cache_file_name=None if file is None else str(file),
            features=datasets.Features.from_arrow_schema(schema),
            fn_kwargs={"kind": kind, "make": make},
            num_proc=workers_for(rows),
            new_fingerprint="examples",
            desc=title,
        )
    examples = Examples(kind, encoded.data.table)
    reasons = encoded.data.table[REASON].drop_null().to_pylist()
    return examples, Counter(reasons)


def _encode_batch(batch: pa.Table, numbers: Sequence[int], kind: type[E], make: MakeExamples[E]) -> pa.Table:
    """The table of a batch: its examples, then a row for each data row without one.

    Args:
        batch: column of pickled rows.
        numbers: numbers of these rows in the data.
        kind, make: see `encode_rows`.
    """
    rows = [pickle.loads(content) for content in batch[ROW].to_pylist()]
    examples, dropped = make(rows, held_out=True)
    return table_of(kind, examples, list(dropped.elements()), numbers[0])


_forks_end_with_parent = False


@contextmanager
def _ending_with_this_process() -> Iterator[None]:
    """Inside, a process that is forked ends with this one, even if this one is killed; the library's would stay."""
    global _forks_end_with_parent
    _forks_end_with_parent = True
    try:
        yield
    finally:
        _forks_end_with_parent = False


def _end_with_parent() -> None:
    if _forks_end_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


os.register_at_fork(after_in_child=_end_with_parent)
