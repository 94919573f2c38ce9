# SPDX-License-Identifier: Apache-2.0
"""Runs subcommands of `dschat` as separate processes, for programs that run several of them in turn."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dschat.base.errors import UserError

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
        """The command line of a subcommand, which starts its processes."""
        words = [sys.executable, "-m", "dschat", *name.split(), *flags]
        if self.count > 1:
            words += ["--num_gpus", str(self.count)]
        return words


ONE = Processes()


def as_arguments(flags: Mapping[str, object]) -> list[str]:
    """{"--flag": value} → ["--flag", "value"]."""
    words: list[str] = []
    for flag, value in flags.items():
        words += [flag, str(value)]
    return words


def run_step(name: str, flags: Sequence[str], processes: Processes) -> None:
    """Runs a subcommand and shows its output.

    Raises:
        UserError: it failed.
    """
    command = processes.command(name, flags)
    print(_title(command), flush=True)
    status = subprocess.run(command, env=_environment(processes.threads)).returncode
    _check_status(name, status)


def run_steps(steps: Sequence[tuple[str, Sequence[str]]], at_once: int = 2, threads: int = 1) -> None:
    """Runs independent subcommands, one process each, and shows the output of each when it ends.

    Args:
        steps: subcommands with their flags.
        at_once: processes that run at a time.
        threads: threads of each process.

    Raises:
        UserError: one failed; those that have not started do not run.
    """
    commands = [ONE.command(name, flags) for name, flags in steps]
    pool = ThreadPoolExecutor(at_once)
    try:
        results = pool.map(partial(_run_captured, threads), commands)
        for (name, _), command, result in zip(steps, commands, results, strict=True):
            print(f"{_title(command)}\n{result.stdout}", end="", flush=True)
            _check_status(name, result.returncode)
    finally:
        pool.shutdown(cancel_futures=True)


def run_policies(runs: Sequence[Sequence[str]], at_once: int, processes: Processes, threads: int = 1) -> None:
    """Runs step 3 with each run's flags: several runs at a time, or one at a time if each has several processes."""
    if processes.count > 1:
        for flags in runs:
            run_step("ppo", flags, processes)
        return
    print(f"== {len(runs)} runs of step 3, {at_once} at a time; the output of each is shown when it ends", flush=True)
    run_steps([("ppo", flags) for flags in runs], at_once, threads)


def _run_captured(threads: int, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command with its output and errors in one text."""
    return subprocess.run(
        command,
        env=_environment(threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _title(command: Sequence[str]) -> str:
    """The line above a command's output."""
    words = ["dschat", *command[3:]]
    return f"== {shlex.join(words)}"


def _environment(threads: int) -> dict[str, str]:
    """The variables of a subcommand: this number of threads unless set otherwise, one GPU unless a flag says more."""
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "NUM_GPUS": "1"}


def _check_status(name: str, status: int) -> None:
    if status != 0:
        raise UserError(f"{name} ended with status {status}; its message is above.")
