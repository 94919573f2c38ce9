# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C: noted when they come, acted on where a run can stop without losing anything.

dschat/launch.py hands the signal to the training processes. From the first self-check to the last evaluation
(training/loop.py: Loop.fit) it is noted only. At every micro-batch (training/ppo/update.py) `raise_if_stopped` raises
Stopped on all ranks; at every drawn token (rollouts/generate.py) `raise_if_stopped_here` does on one, inside
`stopping_together`; vLLM draws its rollout to the end first. Checkpoints.stopping (run/checkpoint.py) saves where the
run is, and run_main (dschat/main.py) says how to go on and returns the status. A rollout that was being drawn or
scored is not saved: it is drawn again from the same seeds. One that was being trained on is, with the number of its
finished updates, and the update that was cut is done again from its first micro-batch (training/iteration.py). The
pass of the reference before training (training/reference.py) stops alike, with nothing to save. Everywhere else a
signal ends the process at once.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dschat.run.distributed import largest_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_noted = 0  # the first signal that came, 0 without one


class Stopped(BaseException):
    """A signal has asked the run to end; `status` is the exit status that belongs to it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


@contextmanager
def stop_signals() -> Iterator[None]:
    """Inside, the signals are noted only; a second Ctrl-C raises KeyboardInterrupt at once."""
    global _noted
    _noted = 0
    before = {number: signal.signal(number, _note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_if_stopped() -> None:
    """Raises Stopped on every rank once one has noted a signal. Every rank must call it equally often."""
    number = largest_over_ranks(_noted)
    if number:
        raise Stopped(number)


def is_stopping_here() -> bool:
    """Whether this rank has noted a signal."""
    return bool(_noted)


def raise_if_stopped_here() -> None:
    """Raises Stopped on this rank alone, inside `stopping_together`."""
    if _noted:
        raise Stopped(_noted)


@contextmanager
def stopping_together() -> Iterator[None]:
    """Inside, ranks go different ways and may stop alone; at the end all of them do. Every rank must enter it."""
    try:
        yield
    except Stopped:
        raise_if_stopped()
        raise
    raise_if_stopped()


def _note(number: int, frame: FrameType | None) -> None:
    global _noted
    if number == signal.SIGINT == _noted:
        raise KeyboardInterrupt
    _noted = _noted or number
