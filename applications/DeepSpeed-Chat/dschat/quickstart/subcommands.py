# SPDX-License-Identifier: Apache-2.0
"""Runs subcommands of `dschat` as separate processes, for programs that run several of them in turn."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from dschat.base.errors import UserError

Process: TypeAlias = subprocess.Popen[str]
TRAINING = Path(__file__).resolve().parents[2] / "training"


@dataclass(frozen=True)
class Processes:
    """How many processes run a training step, and the ZeRO stage of its models."""

    count: int = 1
    zero_stage: int = 0
    threads: int = 1  # threads of each process; threads of very small models mostly wait for each other

    def share(self, batch: int) -> int:
        """One process's part of a batch."""
        return batch // self.count

    def command(self, name: str, flags: Sequence[str]) -> list[str]:
        """The command line of a subcommand; several processes are started by a launcher with a free port."""
        words = [sys.executable, "-m", "dschat", *name.split(), *flags]
        if self.count > 1:
            words += ["--num_gpus", str(self.count), "--master_port", free_port()]
        return words


ONE = Processes()


class Standbys:
    """Processes that import what a training step needs while an earlier step runs, which hides seconds.

    At the end of this context, those that were not used end.
    """

    def __init__(self, processes: Processes) -> None:
        """Prepares for steps with these processes. If they are several, a launcher starts them and none waits."""
        self._processes = processes
        self._waiting: dict[str, list[Process]] = defaultdict(list)

    def start(self, name: str, count: int = 1, is_captured: bool = False) -> None:
        """Starts processes for a training step, whose output is shown at once or captured; see `standby.py`."""
        if self._processes.count > 1:
            return
        words = [sys.executable, "-m", "dschat.quickstart.standby", name]
        for _ in range(count):
            process = _start(words, self._processes.threads, is_captured, stdin=subprocess.PIPE)
            self._waiting[name].append(process)

    def take(self, name: str) -> Process | None:
        """A process that waits for the words of this subcommand; None if there is none."""
        return self._waiting[name].pop() if self._waiting[name] else None

    def __enter__(self) -> "Standbys":
        return self

    def __exit__(self, *error: object) -> None:
        for processes in self._waiting.values():
            for process in processes:
                with process:
                    process.kill()


def as_arguments(flags: Mapping[str, object]) -> list[str]:
    """{"--flag": value} → ["--flag", "value"]."""
    words: list[str] = []
    for flag, value in flags.items():
        words += [flag, str(value)]
    return words


def run_step(name: str, flags: Sequence[str], processes: Processes, standbys: Standbys | None = None) -> None:
    """Runs a subcommand, in a process that waits for it if there is one, and shows its output.

    Raises:
        UserError: it failed.
    """
    command = processes.command(name, flags)
    print(_title(command), flush=True)
    _check_status(name, _run(name, command, processes.threads, standbys).returncode)


def run_steps(
    steps: Sequence[tuple[str, Sequence[str]]], at_once: int = 2, threads: int = 1, standbys: Standbys | None = None
) -> None:
    """Runs independent subcommands, one process each, and shows the output of each when it ends.

    Args:
        steps: subcommands with their flags.
        at_once: processes that run at a time.
        threads: threads of each process.
        standbys: processes that wait for some of them.

    Raises:
        UserError: one failed; those that have not started do not run.
    """
    commands = [ONE.command(name, flags) for name, flags in steps]
    names = [name for name, _ in steps]
    pool = ThreadPoolExecutor(at_once)
    try:
        results = pool.map(
            lambda name, command: _run(name, command, threads, standbys, is_captured=True), names, commands
        )
        for name, command, result in zip(names, commands, results, strict=True):
            print(f"{_title(command)}\n{result.stdout}", end="", flush=True)
            _check_status(name, result.returncode)
    finally:
        pool.shutdown(cancel_futures=True)


def run_policies(
    runs: Sequence[Sequence[str]],
    at_once: int,
    processes: Processes,
    threads: int = 1,
    standbys: Standbys | None = None,
) -> None:
    """Runs step 3 with each run's flags: several runs at a time, or one at a time if each has several processes."""
    if processes.count > 1:
        for flags in runs:
            run_step("ppo", flags, processes)
        return
    print(f"== {len(runs)} runs of step 3, {at_once} at a time; the output of each is shown when it ends", flush=True)
    run_steps([("ppo", flags) for flags in runs], at_once, threads, standbys)


def free_port() -> str:
    """A port of this machine that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def _run(
    name: str, command: Sequence[str], threads: int, standbys: Standbys | None, is_captured: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a command, in a process that waits for it if there is one; captured output and errors are one text."""
    process = None if standbys is None else standbys.take(name)
    words = None
    if process is None:
        process = _start(command, threads, is_captured)
    else:
        words = json.dumps(command[3:])
    with process:
        try:
            output, _ = process.communicate(words)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def _start(command: Sequence[str], threads: int, is_captured: bool, stdin: int | None = None) -> Process:
    """Starts a process, with its output and errors in one pipe if they are captured."""
    return subprocess.Popen(
        command,
        env=_environment(threads),
        stdin=stdin,
        stdout=subprocess.PIPE if is_captured else None,
        stderr=subprocess.STDOUT if is_captured else None,
        text=True,
        errors="replace",
    )


def _title(command: Sequence[str]) -> str:
    """The line above a command's output."""
    words = ["dschat", *command[3:]]
    return f"== {shlex.join(words)}"


def _environment(threads: int) -> dict[str, str]:
    """The variables of a subcommand, with this number of threads and one GPU unless set otherwise."""
    return {"OMP_NUM_THREADS": str(threads), "NUM_GPUS": "1", **os.environ}


def _check_status(name: str, status: int) -> None:
    if status != 0:
        raise UserError(f"{name} ended with status {status}; its message is above.")
