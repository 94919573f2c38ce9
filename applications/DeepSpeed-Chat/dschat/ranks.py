# SPDX-License-Identifier: Apache-2.0
"""Starts the training processes (ranks) of this machine, and waits until all of them have ended.

1. Each rank is a process in a process group of its own, so that a terminal's Ctrl-C reaches it only from here.
2. A signal that stops a run is passed on to every rank. A rank saves a checkpoint first (run/stop.py), however long
   that takes: nothing here cuts a save short but a second Ctrl-C.
3. The first rank that fails, or a second Ctrl-C, ends the others: they have a few seconds to end by themselves, since
   they notice a lost peer and say so, then get SIGTERM, and after half a minute SIGKILL.
4. With a folder for logs, each rank writes to `tee`, which copies its output into a file of that folder.
5. What ranks have started and left behind, such as a server of environments, is ended after them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import psutil

from dschat.base.signals import CtrlC, handled_by, signals_that_stop

CHECK_INTERVAL = 0.1  # seconds between two looks at the ranks
TERM_AFTER = 3.0  # seconds that the other ranks have to end by themselves after a failure or a second Ctrl-C
KILL_AFTER = 30.0  # seconds from SIGTERM to SIGKILL
LOGS_AFTER = 10.0  # seconds from the end of all that to the end of the logs
# Processes that outlive the ranks ("strays") are ended.
STRAYS_TERM_AFTER = 60.0  # seconds from the last rank's end to SIGTERM
STRAYS_KILL_AFTER = 300.0  # seconds from SIGTERM to SIGKILL


def run_ranks(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    signals: PassedOnSignals,
    first_rank: int = 0,
    log_dir: Path | None = None,
) -> int:
    """Runs a command once in each environment, and waits for all of them and what they have started.

    Args:
        command: command line of a rank.
        environments: the variables of each rank of this machine.
        signals: passes signals on to the ranks.
        first_rank: number of the first of them in the run.
        log_dir: existing folder for a file of each rank's output, rank-0.log and so on.

    Returns:
        The exit status: that of the rank that failed first; else 128 + the number of the signal that stopped the run
        (143 after SIGTERM, 130 after Ctrl-C); else 0.
    """
    input_of_ranks, held_open = os.pipe()  # ends when this process ends, in whichever way
    ranks: list[Child] = []
    tees: list[Child] = []
    for number, environment in enumerate(environments, start=first_rank):
        output = None
        if log_dir is not None:
            tees.append(_start_tee(log_dir / f"rank-{number}.log"))
            output = tees[-1].stdin
        ranks.append(
            subprocess.Popen(
                command, env=environment, stdin=input_of_ranks, stdout=output, stderr=output, process_group=0
            )
        )
    os.close(input_of_ranks)
    signals.pass_to(ranks)
    failed = _wait_for(ranks, signals, first_rank)
    _end_strays([rank.pid for rank in ranks])
    for tee in tees:
        with suppress(subprocess.TimeoutExpired):  # a process of a session of its own still holds the rank's output
            tee.communicate(timeout=LOGS_AFTER)
    signals.pass_to(())
    os.close(held_open)
    if failed is not None:
        return failed if failed >= 0 else 128 - failed  # 128 + n if signal n has ended the rank
    if signals.last is not None:
        return 128 + signals.last
    return max(rank.returncode for rank in ranks)  # above 0 after a signal that only ranks got


def _start_tee(file: Path) -> Child:
    """Starts a process that copies its input to standard error and to the end of a file; signals do not reach it."""
    return subprocess.Popen(
        ["tee", "--append", "--output-error=warn", str(file)], stdin=subprocess.PIPE, stdout=2, process_group=0
    )


Child: TypeAlias = "subprocess.Popen[bytes]"


def send_to(child: Child, signal_number: signal.Signals) -> None:
    """Sends a signal to a child process, if it still runs."""
    with suppress(ProcessLookupError):
        child.send_signal(signal_number)


class PassedOnSignals:
    """Signals that stop a run, which do not end this process but are passed on to its children.

    A signal that comes before the children are known is passed on as soon as they are.

    Attributes:
        last: the latest signal; None before the first.
        insists: whether there was a second Ctrl-C.
    """

    def __init__(self, send: Callable[[Child, signal.Signals], None]) -> None:
        """Passes nothing on yet; `send` is how a child gets a signal."""
        self.last: signal.Signals | None = None
        self.insists = False
        self._interrupts = CtrlC()
        self._send = send
        self._children: Sequence[Child] = ()

    def pass_to(self, children: Sequence[Child]) -> None:
        """Sets the processes that get signals; a signal that has already come is passed on at once."""
        self._children = children
        if self.last is not None:
            self._pass_on(self.last)

    def handle(self, signal_number: int, frame: FrameType | None) -> None:
        """Passes a signal on that has just come."""
        self.last = signal.Signals(signal_number)
        if self.last == signal.SIGINT and self._interrupts.is_second():
            self.insists = True
        self._pass_on(self.last)

    def _pass_on(self, signal_number: signal.Signals) -> None:
        for child in self._children:
            self._send(child, signal_number)


@contextmanager
def passing_on_signals(send: Callable[[Child, signal.Signals], None] = send_to) -> Iterator[PassedOnSignals]:
    """Context in which signals that stop a run are passed on to the children that `pass_to` names."""
    signals = PassedOnSignals(send)
    with handled_by(signals.handle):
        yield signals


def _wait_for(ranks: Sequence[Child], signals: PassedOnSignals, first_rank: int) -> int | None:
    """Waits until every rank has ended; the first failure ends the others. Returns the failed rank's status.

    So does a second Ctrl-C: a rank that waits for another inside of a library does not notice it.
    """
    failed: int | None = None  # local number of the rank that failed first
    ending_since: float | None = None  # when the first rank failed, or the second Ctrl-C came
    steps = [(TERM_AFTER, signal.SIGTERM), (TERM_AFTER + KILL_AFTER, signal.SIGKILL)]
    while True:
        running = [rank for rank in ranks if rank.poll() is None]
        if ending_since is None:
            failed = _first_failed(ranks, signals.last)
            if failed is not None and ranks[failed].returncode < 0:  # it could not say anything itself
                _warn(f"rank {first_rank + failed} {_end_of(ranks[failed])}")
        if not running:
            return None if failed is None else ranks[failed].returncode
        if ending_since is None and (failed is not None or signals.insists):
            ending_since = time.monotonic()
        if ending_since is not None and steps and time.monotonic() - ending_since > steps[0][0]:
            signal_number = steps.pop(0)[1]
            why = "Ctrl-C" if failed is None else f"rank {first_rank + failed} {_end_of(ranks[failed])}"
            _warn(f"{why}; the others get {signal_number.name}")
            for rank in running:
                send_to(rank, signal_number)
        time.sleep(CHECK_INTERVAL)


def _first_failed(ranks: Sequence[Child], signal_number: signal.Signals | None) -> int | None:
    """The local number of a rank that has failed; None if none has.

    Of several, it is one that a signal has ended: others may have failed because that one has gone. A rank that a
    signal has stopped has not failed: it ends with 128 + the signal's number after its checkpoint, or by
    `signal_number`, which it was sent, before it began to train.
    """
    stops = {128 + number for number in signals_that_stop()}
    if signal_number is not None:
        stops.add(-signal_number)
    failures = []
    for number, rank in enumerate(ranks):
        if rank.returncode not in (None, 0) and rank.returncode not in stops:
            failures.append(number)
    return min(failures, key=lambda number: ranks[number].returncode > 0, default=None)


def _end_of(rank: Child) -> str:
    """How a rank has ended, as the end of a sentence."""
    if rank.returncode < 0:
        return f"was ended by {signal.Signals(-rank.returncode).name}"
    return f"has ended with status {rank.returncode}"


def _end_strays(groups: Sequence[int]) -> None:
    """Waits for processes that have outlived the ranks of their groups, and ends those that do not end themselves."""
    for patience, signal_number in ((STRAYS_TERM_AFTER, signal.SIGTERM), (STRAYS_KILL_AFTER, signal.SIGKILL)):
        end = time.monotonic() + patience
        strays = _processes_of(groups)
        while strays and time.monotonic() < end:
            time.sleep(CHECK_INTERVAL)
            strays = _processes_of(groups)
        if not strays:
            return
        process_ids = ", ".join(str(process.pid) for process in strays)
        _warn(f"the ranks have ended, but not their processes {process_ids}: they get {signal_number.name}")
        for process in strays:
            with suppress(psutil.Error):
                process.send_signal(signal_number)


def _processes_of(groups: Sequence[int]) -> list[psutil.Process]:
    """The processes of the groups that still run; zombies do not count.

    The number of a group that has ended may be that of a stranger's by now, but not in this session.
    """
    running = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            is_own = os.getpgid(process.pid) in groups and os.getsid(process.pid) == os.getsid(0)
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def _warn(text: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        sys.stderr.write(f"warning: {text}\n")
        sys.stderr.flush()
