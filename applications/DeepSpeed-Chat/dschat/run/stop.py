# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, Ctrl-C, SIGHUP and the end of --max_time: handled where a run can stop without losing anything.

1. dschat/ranks.py forwards the signal to the training processes. Each of them reads its own clock for --max_time.
2. While a run trains, from the first evaluation to the last (training/loop.py: Loop.fit), a process only records it.
3. `raise_if_stopped` raises Stopped on all ranks at every micro-batch (in training/ppo/update.py, for example).
   `raise_if_stopped_here` raises it on one rank at every sampled token (in rollouts/continuous.py, say), inside
   `stopping_together`. vLLM finishes its rollout first.
4. Checkpoints.stopping (run/checkpoint.py) saves a checkpoint.
5. run_main (dschat/main.py) says how to resume, and returns the exit status.

A rollout that was being sampled or scored is not saved: it is sampled again from the same seeds. A rollout that was
being trained on is saved with the number of finished updates; the interrupted update starts again from its first
micro-batch (training/iteration.py). If only the critic was updated on it, a checkpoint that this process wrote just
before it stays. The reference's pass before training (training/reference.py) stops in the same way, with nothing to
save. Everywhere else a signal ends the process at once.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dschat.base.signals import CtrlC, handled_by
from dschat.run.distributed import largest_over_ranks

_received = 0  # the first signal that arrived, or 0
_interrupts = CtrlC()
_deadline = math.inf  # when --max_time is over, on the clock of time.monotonic
DEADLINE = int(signal.SIGALRM)  # stands for the end of --max_time among the signals' numbers; the signal is not used


class Stopped(BaseException):
    """A signal asked the run to stop, or --max_time is over; `status` is the exit status for it.

    At the end of --max_time that is the status after SIGTERM, so that one status means "saved, to be continued".
    It is no Exception, so that `except Exception` does not swallow it.
    """

    def __init__(self, number: int) -> None:
        if number == DEADLINE:
            super().__init__("--max_time")
            self.status = 128 + signal.SIGTERM
        else:
            super().__init__(signal.Signals(number).name)
            self.status = 128 + number


@contextmanager
def stopping_at(deadline: float) -> Iterator[None]:
    """Inside, this process stops its run at a time on the clock of time.monotonic; before training, without saving."""
    global _deadline
    _deadline = deadline
    try:
        yield
    finally:
        _deadline = math.inf


@contextmanager
def stop_signals() -> Iterator[None]:
    """Inside, signals are only recorded; a second Ctrl-C raises KeyboardInterrupt at once."""
    global _received, _interrupts
    _received = 0
    _interrupts = CtrlC()
    with handled_by(_record):
        yield


def raise_if_stopped() -> None:
    """Raises Stopped on every rank if one of them has to stop. Every rank must call it equally often."""
    number = largest_over_ranks(_reason())
    if number:
        raise Stopped(number)


def is_stopping_here() -> bool:
    """Whether this rank has received a signal, or its time is over."""
    return bool(_reason())


def raise_if_stopped_here() -> None:
    """Raises Stopped on this rank alone. Call it only inside `stopping_together`."""
    if number := _reason():
        raise Stopped(number)


@contextmanager
def stopping_together() -> Iterator[None]:
    """Inside, a rank may stop alone; at the end all ranks stop if one did. Every rank must enter it."""
    try:
        yield
    except Stopped:
        raise_if_stopped()
        raise
    raise_if_stopped()


def _reason() -> int:
    """The number of the signal for which this rank has to stop, DEADLINE if --max_time is over, or 0."""
    if not _received and time.monotonic() >= _deadline:
        return DEADLINE
    return _received


def _record(number: int, frame: FrameType | None) -> None:
    global _received
    if number == signal.SIGINT and _interrupts.is_second():
        raise KeyboardInterrupt
    _received = _received or number
