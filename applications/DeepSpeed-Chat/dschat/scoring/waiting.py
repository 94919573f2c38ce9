# SPDX-License-Identifier: Apache-2.0
"""Waiting for servers, which a signal ends. Call it all inside `dschat.run.stop.stopping_together`."""

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

from dschat.run.stop import Stopped, raise_if_stopped_here

S = TypeVar("S")
T = TypeVar("T")
TICK = 0.1  # seconds between two checks for a signal


def pause(seconds: float) -> None:
    """Sleeps; raises Stopped soon after a signal."""
    end = time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        raise_if_stopped_here()
        time.sleep(min(TICK, remaining))


def wait_for(work: Callable[[], T], seconds: float) -> T:
    """Runs `work` in a thread, which is abandoned if it takes too long, and returns its result or raises its error.

    Raises:
        TimeoutError: there is no result after `seconds`.
        Stopped: soon after a signal.
    """
    results = run_in_threads(lambda _: work(), [None], 1, threading.Event(), seconds)
    if not results:
        raise TimeoutError
    return results[0]


def run_in_threads(
    function: Callable[[S], T], items: Sequence[S], concurrency: int, stop: threading.Event, patience: float
) -> dict[int, T]:
    """Results of a function by the number of its item, from threads that do not keep a process from ending.

    Args:
        function: is called for each item.
        items: items of the calls.
        concurrency: calls at the same time.
        stop: is set when calls that are under way are abandoned: after a signal, or for lack of patience.
        patience: seconds after which items without a result are left out.

    Raises:
        Stopped: soon after a signal.
    """
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    is_over = threading.Event()
    end = time.monotonic() + patience

    def work() -> None:
        while not errors and not is_over.is_set():
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            try:
                results[number] = function(items[number])
            except BaseException as error:
                errors.append(error)

    threads = []
    for _ in range(min(concurrency, len(items))):
        threads.append(threading.Thread(target=work, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            try:
                raise_if_stopped_here()
            except Stopped:
                stop.set()
                raise
            if time.monotonic() > end:
                is_over.set()
                stop.set()
                break
            thread.join(TICK)
    if errors:
        raise errors[0]
    return dict(results)
