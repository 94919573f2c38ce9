# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes on this machine through the `deepspeed` launcher."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cli_runs import ROOT, TIMEOUT, Result, environment, result_of, start_forked, warm_programs
from real_size import check_words
from warm_python import PROGRAM_OF_CHILDREN

WORKERS = ROOT / "tests" / "distributed" / "workers.py"
LAUNCHER = Path(sys.executable).parent / "deepspeed"


def free_port() -> str:
    """A port for a launcher that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch_command(script: Path, words: Sequence[Any], processes: int = 2) -> list[str]:
    """The command line, on a port that is free now."""
    options = ["--num_gpus", processes, "--master_addr", "127.0.0.1", "--master_port", free_port()]
    check_words(words)
    return [str(word) for word in (LAUNCHER, *options, script, *words)]


def launch_environment(**changes: str | None) -> dict[str, str]:
    """The variables of a launch: this suite's helpers can be imported, and the project's programs come first.

    DeepSpeed compiles its collectives with the first `ninja` of the PATH; another version would compile them again.
    """
    path = f"{LAUNCHER.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    places = [str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    return environment(PYTHONPATH=os.pathsep.join(filter(None, places)), DS_ACCELERATOR="cpu", PATH=path, **changes)


def launch(script: Path, words: Sequence[Any], processes: int = 2, timeout: float = TIMEOUT) -> Result:
    """Runs a script on several processes to its end; one that hangs is ended and fails the test.

    The launcher and the processes that it starts do without the seconds of imports.
    """
    python = str(warm_programs() / "python")
    command = [python, *launch_command(script, words, processes)]
    with subprocess.Popen(
        command,
        env=launch_environment(**{PROGRAM_OF_CHILDREN: python}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher passes it on
            output, _ = process.communicate()
            raise AssertionError(f"no end within {timeout} s:\n{output}") from None
    return Result(process.returncode, output, "")


def run_ranks(
    step: str | Path,
    words: list[str],
    scratch: Path,
    timeout: float = TIMEOUT,
    first: Callable[[], None] | None = None,
) -> list[Result]:
    """What two ranks of a group say that the launcher did not start, but that were forked: 20 seconds less.

    Args:
        step, words: see `start_forked`.
        scratch: folder for what they print.
        timeout: seconds.
        first: is called in each of them before the step.
    """
    places, port = [scratch / f"rank{number}" for number in (0, 1)], free_port()
    ranks = [start_forked(step, words, place, partial(as_rank, n, port, first)) for n, place in enumerate(places)]
    return [result_of(rank, place, timeout) for rank, place in zip(ranks, places, strict=True)]


def as_rank(number: int, port: str, first: Callable[[], None] | None = None) -> None:
    """In a fork: this process is one of two, as the launcher would start it; `first` is called then."""
    os.environ.update(launch_environment())
    os.environ.update({"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    if first is not None:
        first()
