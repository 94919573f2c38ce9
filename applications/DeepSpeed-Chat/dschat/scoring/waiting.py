# SPDX-License-Identifier: Apache-2.0
"""Waiting that a signal ends: for time to pass, or for something that another thread does."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dschat.run.stop import raise_if_stopped_here

T = TypeVar("T")
TICK = 0.1  # seconds between two looks


def pause(seconds: float) -> None:
    """Lets time pass; raises Stopped soon after a signal. Inside `dschat.run.stop.stopping_together`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        raise_if_stopped_here()
        time.sleep(min(TICK, left))


def wait_for(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns, or raises, in a thread of its own that is left behind if it takes too long.

    Inside `dschat.run.stop.stopping_together`.

    Raises:
        TimeoutError: there is no result after so many seconds.
        Stopped: soon after a signal.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < end:
        raise_if_stopped_here()
        thread.join(TICK)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
