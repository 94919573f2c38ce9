# SPDX-License-Identifier: Apache-2.0
"""Mains of the three steps as processes of their own, for whoever runs several of them in turn."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
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

    def command(self, script: str, flags: Sequence[str]) -> list[str]:
        """The command line of a main: plain Python for one process, DeepSpeed's launcher for several."""
        if self.count == 1:
            return [sys.executable, script, *flags]
        launcher = str(Path(sys.executable).parent / "deepspeed")
        return [launcher, "--num_gpus", str(self.count), "--master_port", free_port(), script, *flags]


def as_arguments(flags: Mapping[str, object]) -> list[str]:
    """{"--flag": value} → ["--flag", "value"]."""
    return [str(part) for item in flags.items() for part in item]


def run_step(step: str, flags: Sequence[str], processes: Processes) -> None:
    """The main of a step; its output is shown. Raises UserError where it fails."""
    run_command(step, processes.command(os.path.relpath(TRAINING / step / "main.py"), flags))


def run_command(name: str, command: Sequence[str]) -> None:
    """A command of Python's or DeepSpeed's; its output is shown. Raises UserError, with the name, where it fails."""
    print("== " + shlex.join([Path(command[0]).name, *command[1:]]), flush=True)
    # Models of demos are so small that threads would mostly wait for each other.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    status = subprocess.run(command, env=environment).returncode
    if status:
        raise UserError(f"{name} ended with status {status}; its message is above.")


def free_port() -> str:
    """A port on this machine that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
