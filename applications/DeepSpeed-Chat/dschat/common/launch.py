# SPDX-License-Identifier: Apache-2.0
"""Subcommands of `dschat` as processes of their own, for whoever runs several of them in turn."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dschat.errors import UserError

TRAINING = Path(__file__).resolve().parents[2] / "training"


@dataclass(frozen=True)
class Processes:
    """How many processes run a step, and what they shard."""

    count: int = 1
    zero_stage: int = 0

    def share(self, batch: int) -> int:
        """A process's part of a batch."""
        return batch // self.count

    def command(self, name: str, flags: Sequence[str]) -> list[str]:
        """The command line of a subcommand."""
        words = [sys.executable, "-m", "dschat", *name.split(), *flags]
        return words if self.count == 1 else [*words, "--num_gpus", str(self.count), "--master_port", free_port()]


ONE = Processes()


def as_arguments(flags: Mapping[str, object]) -> list[str]:
    """{"--flag": value} → ["--flag", "value"]."""
    return [str(part) for item in flags.items() for part in item]


def run_step(name: str, flags: Sequence[str], processes: Processes) -> None:
    """A subcommand; its output is shown. Raises UserError, with its name, where it fails."""
    command = processes.command(name, flags)
    print(_title(command), flush=True)
    _check(name, subprocess.run(command, env=_environment()).returncode)


def run_steps(steps: Sequence[tuple[str, Sequence[str]]], at_once: int = 2) -> None:
    """Subcommands with their flags that do not need each other, a process each; each one's output follows its end.

    Raises:
        UserError: one failed; those that had not begun do not run.
    """
    commands = [ONE.command(name, flags) for name, flags in steps]
    pool = ThreadPoolExecutor(at_once)
    try:
        for (name, _), command, ended in zip(steps, commands, pool.map(_collected, commands), strict=True):
            print(f"{_title(command)}\n{ended.stdout}", end="", flush=True)
            _check(name, ended.returncode)
    finally:
        pool.shutdown(cancel_futures=True)


def _collected(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def _title(command: Sequence[str]) -> str:
    return "== " + shlex.join(["dschat", *command[3:]])


def _environment() -> dict[str, str]:
    """Models of demos are so small that threads would mostly wait for each other."""
    return {"OMP_NUM_THREADS": "1", "NUM_GPUS": "1", **os.environ}


def _check(name: str, status: int) -> None:
    if status:
        raise UserError(f"{name} ended with status {status}; its message is above.")


def free_port() -> str:
    """A port on this machine that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
