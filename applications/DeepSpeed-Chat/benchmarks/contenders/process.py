# SPDX-License-Identifier: Apache-2.0
"""A contender's process: `Contender` starts it and requests iterations, `read_job` is the process's own end.

The number of its end of the pipe is on the process's command line:

    Contender → process: the job             process → Contender: empty figures, when everything is set up
    Contender → process: None                process → Contender: the figures of an iteration     (again and again)
    Contender closes the pipe                the process ends
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import torch

from contenders.meter import IterationFigures, Meter
from contenders.work import IterationWork

BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class ContenderJob:
    """The settings of a contender's process."""

    work: IterationWork
    files: str  # folder that `make_files` filled
    folder: str  # the contender's working directory
    scoring: bool = False  # plain PyTorch: score with actor and critic before training, too
    flags: list[str] = field(default_factory=list)  # ours: more flags of step 3
    random_responses: bool = False  # ours: random tokens instead of sampled responses

    def environment(self) -> dict[str, str]:
        """Variables of the process: one thread, and the path of this package and of this clone's dschat."""
        folders = [str(BENCHMARKS), str(BENCHMARKS.parent)]
        if os.environ.get("PYTHONPATH"):
            folders.append(os.environ["PYTHONPATH"])
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}


class Contender:
    """A contender's process, which ends with its context; its output goes to standard error."""

    def __init__(self, python: str, module: str, job: ContenderJob) -> None:
        """Starts the process and waits until everything is set up.

        Args:
            python: the interpreter.
            module: its module of the package contenders.
            job: its settings.

        Raises:
            RuntimeError: the process ended.
        """
        self._name = module
        self._pipe: Connection[ContenderJob | None, IterationFigures]
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", f"contenders.{module}", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                env=job.environment(),
                cwd=job.folder,
                pass_fds=[theirs.fileno()],
            )
        self._pipe.send(job)
        self._answer()

    def iterate(self) -> IterationFigures:
        """Runs one iteration."""
        self._pipe.send(None)
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._pipe.close()
        self._process.wait()

    def _answer(self) -> IterationFigures:
        """The next message of the process."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            status = self._process.wait()
            raise RuntimeError(f"contenders.{self._name} ended early with status {status}; see its output") from error


def read_job() -> tuple[ContenderJob, Meter]:
    """The job of this process, and its meter."""
    torch.set_num_threads(1)
    pipe = Connection(int(sys.argv[1]))
    job: ContenderJob = pipe.recv()
    return job, Meter(pipe)
