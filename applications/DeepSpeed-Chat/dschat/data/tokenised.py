# SPDX-License-Identifier: Apache-2.0
"""Rows → examples in Arrow files, by the library `datasets`: made by several processes, kept between runs.

A table has a column for every field of the example's dataclass, one of the examples' lengths in tokens, and one that
says why a row is no example. Fields of other types than those of TYPES (log-probs that are computed later) are left at
their defaults. Tables that are kept between runs are entries of `dschat.data.cache`.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields, replace
from pathlib import Path
from threading import Thread
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_args, get_type_hints, overload

import numpy as np
import pyarrow as pa

from dschat.base.progress import progress
from dschat.data.files import os_error_behind
from dschat.data.rows import Row, is_plain

if TYPE_CHECKING:
    from datasets import Dataset, Features

logger = logging.getLogger(__name__)

LENGTH, REASON = "tokens", "left_out"  # the columns of lengths, and of why there is no example
TYPES: dict[object, str | list[str]] = {
    list[int]: ["int32"],
    list[bool]: ["bool"],
    list[str]: ["string"],
    str: "large_string",
    int: "int64",
    bool: "bool",
    float: "float64",
    Row: "large_string",  # as JSON
}
BATCH = 500  # rows that are encoded together
MOST_WORKERS = 32
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # what torchrun and DeepSpeed call the ranks of a machine
FEW = 5_000_000  # characters, up to which one process is as fast as several

E = TypeVar("E")  # a dataclass
E_co = TypeVar("E_co", covariant=True)
Json = dict[str, Any]


class NotStorable(Exception):
    """A row holds what JSON would change: a date, bytes, a key that is no text."""


class MakeExamples(Protocol[E_co]):
    """What makes examples of rows, given all else: see `dschat.data.examples`."""

    def __call__(self, rows: Sequence[Any], *, held_out: bool) -> tuple[Sequence[E_co], Counter[str]]: ...


class Examples(Sequence[E], Generic[E]):
    """The examples of a table; each is made when it is asked for, from files that are mapped into memory."""

    def __init__(self, kind: type[E], table: pa.Table, places: Sequence[int] | None = None) -> None:
        self._kind, self._table, self._fields = kind, table, _stored_fields(kind)
        if places is None:
            reasons = table[REASON]
            places = range(len(table))
            if reasons.null_count < len(table):
                places = np.flatnonzero(reasons.is_null().to_numpy()).tolist()
        self._places = places

    def __len__(self) -> int:
        """Number of examples."""
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> E: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[E]: ...

    def __getitem__(self, place: int | slice) -> E | Sequence[E]:
        """An example, or those of a slice."""
        if isinstance(place, slice):
            return Examples(self._kind, self._table, self._places[place])
        number = self._places[place]
        return self._kind(**{name: self._value(name, hint, number) for name, hint in self._fields.items()})

    def _value(self, name: str, hint: object, number: int) -> Any:
        scalar = self._table[name][number]
        if not scalar.is_valid:
            return None
        if hint in (list[int], list[bool]):
            return scalar.values.to_numpy(zero_copy_only=False).tolist()
        return row_of(scalar.as_py()) if hint is Row else scalar.as_py()

    @property
    def lengths(self) -> list[int]:
        """Tokens of every example, without making it."""
        return list(self._table[LENGTH].to_numpy()[self._places].tolist())


def lengths_of(examples: Sequence[Any]) -> list[int]:
    """Tokens of every example."""
    return examples.lengths if isinstance(examples, Examples) else [len(example) for example in examples]


def open_table(files: Sequence[Path]) -> pa.Table:
    """The Arrow files of a table, mapped into memory. Raises OSError or ValueError where they are damaged."""
    return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files])


def _stored_fields(kind: type) -> dict[str, object]:
    """The fields that a table holds, with their types: X of `X | None`.

    Raises:
        NotStorable: a field without default has a type that is not in TYPES.
    """
    found, hints = {}, get_type_hints(kind)
    for field in fields(kind):
        options = [option for option in get_args(hints[field.name]) if option is not NoneType]
        hint = options[0] if len(options) == 1 and NoneType in get_args(hints[field.name]) else hints[field.name]
        if hint in TYPES:
            found[field.name] = hint
        elif field.default is MISSING:
            raise NotStorable(f"{kind.__name__}.{field.name}")
    return found


def features_of(kind: type) -> Features:
    """The columns of a table of such examples. Raises NotStorable, see above."""
    from datasets import Features, List, Value

    types = {LENGTH: "int64", REASON: "string"} | {name: TYPES[hint] for name, hint in _stored_fields(kind).items()}
    return Features({name: List(Value(of[0])) if isinstance(of, list) else Value(of) for name, of in types.items()})


def columns_of(kind: type[E], examples: Sequence[E], start: int = 0) -> dict[str, list[Any]]:
    """Examples as columns of a table; `start` is added to their field `index`, if they have one.

    Raises:
        NotStorable: a row cannot be kept.
    """
    columns: dict[str, list[Any]] = {LENGTH: [len(e) for e in examples], REASON: [None] * len(examples)}  # type: ignore[arg-type]
    for name, hint in _stored_fields(kind).items():
        values = [getattr(example, name) for example in examples]
        columns[name] = list(map(row_text, values)) if hint is Row else values
    if "index" in columns:
        columns["index"] = [start + number for number in columns["index"]]
    return columns


def row_text(row: Row) -> str:
    """A row as JSON, from which `row_of` makes an equal one.

    Raises:
        NotStorable: it holds what JSON would change.
    """
    held = (row.extra, row.messages, row.chosen_message, row.rejected_message, row.template_arguments)
    if not all(map(is_plain, held)):
        raise NotStorable(row.origin)
    return json.dumps(vars(row), check_circular=False)


def row_of(text: str) -> Row:
    """The row that `row_text` wrote."""
    return Row(**json.loads(text))


def num_workers() -> int:
    """Processes for this one to start: its cores, shared with the other ranks of the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = next(filter(None, map(os.environ.get, LOCAL_SIZES)), "1")
    return max(1, min(MOST_WORKERS, cores // int(ranks)))


def workers_for(rows: Sequence[Row]) -> int:
    """Processes that shorten the encoding of rows: 1 where it is over before others have started."""
    texts = (text for row in rows for text in (row.prompt, row.chosen, row.rejected))
    return num_workers() if sum(len(text or "") for text in texts) >= FEW else 1


def encode_rows(
    kind: type[E],
    make: MakeExamples[E],
    rows: Sequence[Any],
    title: str,
    workers: int = 1,
    show: bool = False,
    folder: Path | None = None,
) -> tuple[Sequence[E], Counter[str]]:
    """The examples of rows in their order, whatever the number of processes; and reason → number of rows left out.

    Args:
        kind: of the examples.
        make: makes them; picklable for workers, else this process does the work.
        rows: all of them.
        title: of the progress bar, and of the files in `folder`.
        workers: processes; 1 = this one.
        show: whether to show progress.
        folder: to write Arrow files to; None = the examples stay in memory.

    Raises:
        UserError: what `make` raises.
        NotStorable: a row that an example holds cannot be kept.
        OSError: `folder` cannot be written.
    """
    starts = list(range(0, len(rows), BATCH))
    workers = min(workers, len(starts)) if workers > 1 and _can_be_sent(make) else 1
    if not starts or (folder is None and workers == 1):
        return _encode_here(make, rows, title, show)
    try:
        return _encode_in_tables(kind, make, rows, title, workers, show, folder)
    except OSError as error:
        if folder is not None:
            raise
        logger.warning("worker processes need room for temporary files (%s): this process does the work", error)
        return _encode_here(make, rows, title, show)


def _encode_in_tables(
    kind: type[E],
    make: MakeExamples[E],
    rows: Sequence[Any],
    title: str,
    workers: int,
    show: bool,
    folder: Path | None,
) -> tuple[Sequence[E], Counter[str]]:
    """`encode_rows` through tables of the library `datasets`, with temporary files in `folder` or $TMPDIR.

    Raises:
        OSError: a file could not be written.
    """
    from datasets import Dataset, Features, Value

    starts = list(range(0, len(rows), BATCH))
    held = {"start": Value("int64"), "rows": Value("large_binary")}
    with ExitStack() as stack:
        stack.enter_context(library(show))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        parts = Dataset.from_generator(
            lambda: ({"start": n, "rows": pickle.dumps(list(rows[n : n + BATCH]))} for n in starts),
            Features(held), scratch, fingerprint="rows", writer_batch_size=1,
        )  # fmt: skip

        def run(processes: int | None) -> Dataset:
            return parts.map(
                _encode_batch, batched=True, batch_size=1, remove_columns=list(held), features=features_of(kind),
                fn_kwargs={"kind": kind, "make": make, "home": os.getpid()}, num_proc=processes, desc=title,
                keep_in_memory=folder is None, new_fingerprint="examples", load_from_cache_file=False,
                cache_file_name=None if folder is None else str(folder / f"{title.split()[-1]}.arrow"),
            )  # fmt: skip

        try:
            table = run(workers if workers > 1 else None)
        except RuntimeError as error:
            if "died" not in str(error):
                raise
            logger.warning("a worker process ended (is memory short?): this process does the work")
            table = run(None)
    return Examples(kind, table.data.table), Counter(filter(None, table.data[REASON].to_pylist()))


def _encode_here(make: MakeExamples[E], rows: Sequence[Any], title: str, show: bool) -> tuple[list[E], Counter[str]]:
    examples: list[E] = []
    dropped: Counter[str] = Counter()
    with progress(len(rows), title, unit="row", disable=not show) as bar:
        for start in range(0, len(rows), BATCH):
            made, counts = make(rows[start : start + BATCH], held_out=True)
            examples += [_renumbered(example, start) for example in made]
            dropped += counts
            bar.update(min(BATCH, len(rows) - start))
    return examples, dropped


def _renumbered(example: Any, start: int) -> Any:
    """An example whose field `index`, if it has one, counts from the first row instead of the batch's first."""
    return replace(example, index=start + example.index) if start and hasattr(example, "index") else example


def _encode_batch(batch: dict[str, list[Any]], kind: type[E], make: MakeExamples[E], home: int) -> pa.Table:
    """Examples of a batch of rows and, in the places of those that are none, why."""
    if os.getpid() != home:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the main process, and that ends the workers
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    rows = pickle.loads(batch["rows"][0])
    examples, dropped = make(rows, held_out=True)
    columns = columns_of(kind, examples, batch["start"][0])
    reasons = list(dropped.elements())
    filled = {n: [*values, *(reasons if n == REASON else [None] * len(reasons))] for n, values in columns.items()}
    return pa.table(filled, schema=features_of(kind).arrow_schema)  # which `datasets` writes as it is


def _can_be_sent(make: object) -> bool:
    try:
        pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        logger.info("the tokenizer cannot be given to other processes (%s): this one does all the work", error)
        return False
    return True


@contextmanager
def library(show: bool) -> Iterator[None]:
    """Inside, `datasets` shows progress on a terminal alone, and its processes are not forked and end with this one.

    Not forked: this process may hold a CUDA context and threads.

    Raises:
        OSError: a file could not be written, also where the library reports that as an error of its own.
    """
    import datasets
    import multiprocess
    from datasets.exceptions import DatasetsError
    from multiprocess.context import SpawnContext
    from multiprocess.managers import SyncManager

    def manager(context: Any) -> Any:
        started = SyncManager(ctx=context)
        started.start(_end_with_parent)
        return started

    method, were_shown = multiprocess.get_start_method(allow_none=True), datasets.is_progress_bar_enabled()
    (datasets.enable_progress_bars if show and os.isatty(2) else datasets.disable_progress_bars)()
    multiprocess.set_start_method("spawn", force=True)
    SpawnContext.Manager = manager
    try:
        yield
    except DatasetsError as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror or str(cause), cause.filename) from error
    finally:
        del SpawnContext.Manager  # that of its base class is found again
        multiprocess.set_start_method(method, force=True)
        (datasets.enable_progress_bars if were_shown else datasets.disable_progress_bars)()


def _end_with_parent() -> None:
    """In the process that holds the queue of the workers: ends it when their parent was killed, and so the workers."""
    from multiprocess import parent_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
