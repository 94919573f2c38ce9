# SPDX-License-Identifier: Apache-2.0
"""Both ends of a contender's process: a `Contender` requests iterations, a `Meter` inside the process measures them.

They share a pipe, whose end is on the command line of the process: a job goes in, then None for each iteration, whose
figures come back; closing the pipe ends the process. CPU time is ``time.process_time``: seconds of all threads of the
process, whatever else the machine does. Memory counts from its size when everything was set up, before the first
iteration, so that optimizer states count; see `harness.Peak`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, Self, TypeVar

import torch

from contenders.work import IterationWork, make_files
from harness import MB, Peak

BENCHMARKS = Path(__file__).resolve().parents[1]
PHASES = ("generation", "scoring", "training", "rest")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ContenderJob:
    """The settings of a contender's process."""

    work: IterationWork
    files: str  # folder that `make_files` filled
    folder: str  # the contender's own folder
    scoring: bool = False  # plain PyTorch: score with actor and critic before training, too
    flags: list[str] = field(default_factory=list)  # ours: more flags of step 3
    random_responses: bool = False  # ours: random tokens instead of sampled responses

    def environment(self) -> dict[str, str]:
        """Variables of the process: one thread, and the path of this package and of this clone's dschat."""
        folders = [str(BENCHMARKS), str(BENCHMARKS.parent)]
        if os.environ.get("PYTHONPATH"):
            folders.append(os.environ["PYTHONPATH"])
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}


def _sums() -> dict[str, float]:
    return defaultdict(float)


@dataclass(frozen=True)
class IterationFigures:
    """Figures of one iteration."""

    cpu_seconds: dict[str, float] = field(default_factory=_sums)  # by phase, and their total
    wall_seconds: dict[str, float] = field(default_factory=_sums)  # by phase, and their total
    inside_cpu_seconds: dict[str, float] = field(default_factory=_sums)  # seconds of parts of the phases
    counts: dict[str, float] = field(default_factory=_sums)
    peak_mb: float = 0.0
    tokens: float = 0.0  # tokens of all its responses
    held_mb: float = 0.0  # memory before the first iteration; the peak counts from there


def usual(runs: Sequence[IterationFigures]) -> IterationFigures:
    """Medians over iterations; the peak of all."""

    def middle(kind: str) -> dict[str, float]:
        dicts = [getattr(run, kind) for run in runs]
        medians = {}
        for name in dicts[0]:
            medians[name] = round(statistics.median(numbers[name] for numbers in dicts), 4)
        return medians

    dicts = (middle("cpu_seconds"), middle("wall_seconds"), middle("inside_cpu_seconds"), middle("counts"))
    tokens = statistics.median(run.tokens for run in runs)
    return IterationFigures(*dicts, max(run.peak_mb for run in runs), tokens, runs[0].held_mb)


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
            raise RuntimeError("a contender ended early; what it said is above") from error


def run_alone(job: ContenderJob, repeats: int) -> IterationFigures:
    """Runs step 3 without other contenders; the phases of each iteration are printed to standard error.

    Args:
        job: its settings; missing models are made. The contender gets a folder of its own below the job's.
        repeats: iterations that count, after one that does not.

    Returns:
        The median iteration.

    Raises:
        RuntimeError: its process ended early.
    """
    runs = []
    work = job.work
    make_files(work, Path(job.files))
    torch.cuda.empty_cache()  # so that the contender has the memory that this process has cached
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        with Contender(sys.executable, "ours", replace(job, folder=folder)) as contender:
            for number in range(repeats + 1):
                runs.append(contender.iterate())
                phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in runs[-1].wall_seconds.items())
                print(f"batch {work.batch}, iteration {number}: {phases}", file=sys.stderr, flush=True)
    return usual(runs[1:])


class Meter:
    """Measures the iterations of this process, each when it is asked for."""

    def __init__(self, pipe: Connection[IterationFigures, ContenderJob | None]) -> None:
        self._pipe = pipe
        self._peak: Peak | None = None
        self._last = (0.0, 0.0)
        self._others = 0.0  # seconds inside the measured function that another name has already
        self.now = IterationFigures()

    def begin(self) -> None:
        """Waits until an iteration is requested; the first call reports that everything is set up."""
        if self._peak is None:
            self._peak = Peak(torch.cuda.is_available())
            self._pipe.send(self.now)
        try:
            self._pipe.recv()
        except EOFError:
            os._exit(0)  # skips the contender's own end, which may save models
        self.now = IterationFigures()
        self._last = _seconds()

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to a phase."""
        before = self._last
        self._last = _seconds()
        for booked, start, end in zip((self.now.cpu_seconds, self.now.wall_seconds), before, self._last, strict=True):
            booked[name] += end - start

    def inside(self, name: str, work: Callable[P, R]) -> Callable[P, R]:
        """Wraps a function, whose CPU time is added to a name; wrapped functions inside it count under their own."""

        @wraps(work)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.process_time()
            before = self._others
            self._others = 0.0
            try:
                return work(*args, **kwargs)
            finally:
                seconds = time.process_time() - start
                self.now.inside_cpu_seconds[name] += seconds - self._others
                self._others = before + seconds

        return run

    def end(self, tokens: float) -> None:
        """Ends an iteration and sends its figures.

        Args:
            tokens: tokens of all its responses.
        """
        assert self._peak is not None
        self.lap("rest")
        for seconds in (self.now.cpu_seconds, self.now.wall_seconds):
            seconds["total"] = sum(seconds.values())
        peak = self._peak.bytes() / MB
        held = self._peak.before / MB
        self._pipe.send(replace(self.now, peak_mb=peak, tokens=tokens, held_mb=held))


def read_job() -> tuple[ContenderJob, Meter]:
    """The job of this process, and its meter."""
    torch.set_num_threads(1)
    pipe = Connection(int(sys.argv[1]))
    job: ContenderJob = pipe.recv()
    return job, Meter(pipe)


def _seconds() -> tuple[float, float]:
    """CPU and wall time when the GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.process_time(), time.perf_counter()
