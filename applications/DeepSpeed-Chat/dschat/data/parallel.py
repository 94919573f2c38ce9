# SPDX-License-Identifier: Apache-2.0
"""Rows → examples in batches, in worker processes; the order and the result are those of one process."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dschat.common.progress import progress
from dschat.data.rows import Row
from dschat.data.stored import to_batch

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

BATCH = 500  # rows
MOST_WORKERS = 32
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # what torchrun and DeepSpeed call the ranks of a machine
FEW = 5_000_000  # characters, up to which one process is as fast as several

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)
T = TypeVar("T")
BatchWork = Callable[[Sequence[Any], int], T]
Encoded = tuple["pa.RecordBatch", Counter[str]]  # examples of a batch of rows; reason → number of the rows dropped


class MakeExamples(Protocol[E_co]):
    """What makes examples of rows, given all else: see `dschat.data.examples`."""

    def __call__(self, rows: Sequence[Any], *, held_out: bool) -> tuple[Sequence[E_co], Counter[str]]: ...


class Encoder(Generic[E]):
    """Makes a part of a table from a batch of rows."""

    def __init__(self, kind: type[E], make: MakeExamples[E]) -> None:
        self.kind, self.make = kind, make

    def __call__(self, rows: Sequence[Any], start: int) -> Encoded:
        """Examples of rows of which the first has the number `start`."""
        examples, dropped = self.make(rows, held_out=True)
        return to_batch(self.kind, examples, start), dropped


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
    encoder: BatchWork[T], rows: Sequence[Any], title: str = "", workers: int = 1, show: bool = False
) -> Iterator[T]:
    """What an encoder makes of batches of rows, in their order: parts of a table, or counts.

    Args:
        encoder: takes a batch and the number of its first row; picklable for workers, else this process does the work.
        rows: all of them.
        title: of the progress bar.
        workers: processes; 1 = this one.
        show: whether to show progress.

    Raises:
        UserError: what the encoder raises.
    """
    starts = range(0, len(rows), BATCH)
    with progress(len(rows), title, unit="row", disable=not show) as bar:
        done = 0
        if workers > 1 and len(starts) > 1:
            for encoded in _in_workers(encoder, rows, starts, min(workers, len(starts))):
                bar.update(min(BATCH, len(rows) - starts[done]))
                done += 1
                yield encoded
        for start in starts[done:]:
            yield encoder(rows[start : start + BATCH], start)
            bar.update(min(BATCH, len(rows) - start))


def _in_workers(encoder: BatchWork[T], rows: Sequence[Any], starts: Sequence[int], workers: int) -> Iterator[T]:
    """As many parts as workers make; fewer than all where they cannot be started or one is killed."""
    try:
        frozen = pickle.dumps(encoder)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        logger.info("the tokenizer cannot be given to other processes (%s): this one does all the work", error)
        return
    # Not forked: this process may hold a CUDA context and threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(frozen,)) as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for start in starts:
                waiting.append(pool.submit(_encode, rows[start : start + BATCH], start))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            logger.warning("a worker process ended (is memory short?): this process does the rest of the work")
        finally:
            for future in waiting:
                future.cancel()


_encoder: BatchWork[object] | None = None  # of a worker process


def _start_worker(frozen: bytes) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the main process, and that ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _encoder = pickle.loads(frozen)


def _encode(rows: Sequence[Any], start: int) -> object:
    assert _encoder is not None
    return _encoder(rows, start)
