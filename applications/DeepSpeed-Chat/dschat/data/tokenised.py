# SPDX-License-Identifier: Apache-2.0
"""Rows → examples in Arrow tables, encoded by one or several processes.

A table has a column for every field of the example's dataclass, one for the examples' lengths in tokens, and one for
the reason why a row gives no example. Fields whose type is not in ARROW_TYPES (log-probs that are computed later) keep
their defaults. Tables that are kept between runs are entries of `dschat.data.cache`.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from threading import Thread
from types import NoneType
from typing import Any, Generic, Protocol, TypeVar, get_args, get_type_hints, overload

import numpy as np
import pyarrow as pa

from dschat.base.progress import progress
from dschat.data.rows import Row, is_plain

logger = logging.getLogger(__name__)

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
BATCH = 500  # rows that are encoded together
MOST_WORKERS = 32
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's and DeepSpeed's names for the ranks of a machine
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


def open_table(files: Sequence[Path]) -> pa.Table:
    """The Arrow files of a table, mapped into memory. Raises OSError or ValueError where they are damaged."""
    return pa.concat_tables([_read_stream(pa.memory_map(str(file))) for file in files])


def _read_stream(source: Any) -> pa.Table:
    return pa.ipc.open_stream(source).read_all()


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


def workers_for(rows: Sequence[Row]) -> int:
    """Processes that shorten the encoding of rows; 1 where it is finished before others have started."""
    characters = 0
    for row in rows:
        for text in (row.prompt, row.chosen, row.rejected):
            characters += len(text or "")
    return num_workers() if characters >= FEW else 1


@dataclass(frozen=True)
class BatchEncoder(Generic[E]):
    """Encodes batches of rows; worker processes get a copy when they start."""

    kind: type[E]
    make: MakeExamples[E]

    def encode(self, start: int, rows: Sequence[Any]) -> pa.Table:
        """The table of a batch: examples, then a row for each data row without one. `start` counts the rows before."""
        examples, dropped = self.make(rows, held_out=True)
        return table_of(self.kind, examples, list(dropped.elements()), start)

    def is_picklable(self) -> bool:
        """Whether worker processes can get it; a tokenizer with Python code of the user's, for instance, cannot."""
        try:
            pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            logger.info("the tokenizer cannot be given to other processes (%s): this one does all the work", error)
            return False
        return True


def encode_rows(
    kind: type[E],
    make: MakeExamples[E],
    rows: Sequence[Any],
    title: str,
    workers: int = 1,
    show: bool = False,
    file: Path | None = None,
) -> tuple[Examples[E], Counter[str]]:
    """Encodes rows; the result does not depend on the number of processes.

    Args:
        kind: kind of the examples.
        make: makes examples of rows; if it cannot be pickled, this process does all the work.
        rows: rows of the data.
        title: title of the progress bar.
        workers: processes that encode; 1 = this one.
        show: whether to show progress.
        file: Arrow file to write the table to; None = the table stays in memory.

    Returns:
        The examples in the order of the rows, and reason → number of rows without an example.

    Raises:
        UserError: raised by `make`.
        NotStorable: a row that an example holds cannot be kept.
        OSError: `file` cannot be written.
    """
    encoder = BatchEncoder(kind, make)
    starts = range(0, len(rows), BATCH)
    sizes = [min(BATCH, len(rows) - start) for start in starts]
    workers = min(workers, len(starts))

    def batches() -> Iterator[list[Any]]:
        for start in starts:
            yield list(rows[start : start + BATCH])

    def collect(tables: Iterable[pa.Table]) -> tuple[Examples[E], Counter[str]]:
        with progress(len(rows), title, unit="row", disable=not show) as bar:
            return _collect(kind, tables, sizes, bar.update, file)

    if workers > 1 and encoder.is_picklable():
        # Spawned, since this process may hold a CUDA context and threads, which a fork would break.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, context, _start_worker, (encoder,))
        try:
            return collect(pool.map(_encode_in_worker, starts, batches()))
        except BrokenProcessPool:
            logger.warning("a worker process ended (is memory short?): this process does the work")
        finally:
            pool.shutdown(cancel_futures=True)
    return collect(map(encoder.encode, starts, batches()))


def _collect(
    kind: type[E], tables: Iterable[pa.Table], sizes: Sequence[int], report: Callable[[int], object], file: Path | None
) -> tuple[Examples[E], Counter[str]]:
    """Writes the tables of batches one after another; `report` is called with the size of each finished batch."""
    buffer = pa.BufferOutputStream()
    sink = buffer if file is None else open(file, "wb")  # noqa: SIM115
    with sink, pa.ipc.new_stream(sink, schema_of(kind)) as writer:
        for table, size in zip(tables, sizes, strict=True):
            writer.write_table(table)
            report(size)
    whole = open_table([file]) if file is not None else _read_stream(buffer.getvalue())
    reasons = whole[REASON].drop_null().to_pylist()
    return Examples(kind, whole), Counter(reasons)


_worker_encoder: BatchEncoder[Any] | None = None  # set in worker processes


def _start_worker(encoder: BatchEncoder[Any]) -> None:
    """Prepares a worker process, which must end with the process that started it, however that ends."""
    global _worker_encoder
    _worker_encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the main process, which ends its workers
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(start: int, rows: Sequence[Any]) -> pa.Table:
    assert _worker_encoder is not None  # `_start_worker` has set it
    return _worker_encoder.encode(start, rows)
