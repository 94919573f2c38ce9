# SPDX-License-Identifier: Apache-2.0
"""The signals that stop a run."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Within this time a second Ctrl-C is the first one again: a terminal and a launcher may both send it.
SAME_CTRL_C = 1.0  # seconds


def signals_that_stop() -> list[signal.Signals]:
    """SIGTERM, SIGINT (Ctrl-C), and SIGHUP (closed terminal) unless this process ignores it, as under nohup."""
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


class CtrlC:
    """Tells a second Ctrl-C from the first one."""

    def __init__(self) -> None:
        self._first_at: float | None = None  # seconds

    def is_second(self) -> bool:
        """Notes a Ctrl-C; whether it is a second one."""
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            return False
        return now - self._first_at > SAME_CTRL_C


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context in which a function handles the signals that stop a run; the earlier handlers are restored after it."""
    earlier_handlers = {number: signal.signal(number, handler) for number in signals_that_stop()}
    try:
        yield
    finally:
        for number, earlier in earlier_handlers.items():
            if earlier is not None:  # None: the handler was not installed by Python, which cannot set it again
                signal.signal(number, earlier)
