# SPDX-License-Identifier: Apache-2.0
"""What a contender measures inside its process: the figures of an iteration, and the `Meter` that takes them.

CPU time is ``time.process_time``: seconds of all threads of the process, whatever else the machine does. Memory counts
from its size when everything was set up, before the first iteration, so that optimizer states count; see
`harness.Peak`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

import torch

from harness import MB, Peak

PHASES = ("generation", "scoring", "training", "rest")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class IterationFigures:
    """Figures of one iteration.

    Attributes:
        cpu_seconds: CPU seconds of each phase, and of all ("total").
        wall_seconds: seconds of each phase, and of all ("total").
        function_seconds: CPU seconds inside functions that are measured on their own.
        counts: how often something happened, by name.
        peak_mb: most memory during the iteration, above `held_mb`.
        tokens: tokens of all responses.
        held_mb: memory before the first iteration.
    """

    cpu_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wall_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    function_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    peak_mb: float = 0.0
    tokens: float = 0.0
    held_mb: float = 0.0


def median_figures(runs: Sequence[IterationFigures]) -> IterationFigures:
    """Medians over iterations; the largest peak."""
    return IterationFigures(
        cpu_seconds=_medians([run.cpu_seconds for run in runs]),
        wall_seconds=_medians([run.wall_seconds for run in runs]),
        function_seconds=_medians([run.function_seconds for run in runs]),
        counts=_medians([run.counts for run in runs]),
        peak_mb=max(run.peak_mb for run in runs),
        tokens=statistics.median(run.tokens for run in runs),
        held_mb=runs[0].held_mb,
    )


def _medians(numbers: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each name."""
    medians = {}
    for name in numbers[0]:
        median = statistics.median(run[name] for run in numbers)
        medians[name] = round(median, 4)
    return medians


class Meter:
    """Measures the iterations of this process, each when it is asked for."""

    def __init__(self, pipe: Connection[IterationFigures, object]) -> None:
        """Takes the process's end of the pipe; see `contenders.process`."""
        self._pipe = pipe
        self._peak: Peak | None = None
        self._last_lap = (0.0, 0.0)
        self._nested_seconds = 0.0  # CPU seconds of measured functions that the running one has called
        self.figures = IterationFigures()

    def begin(self) -> None:
        """Waits until an iteration is requested; the first call reports that everything is set up."""
        if self._peak is None:
            self._peak = Peak(torch.cuda.is_available())
            self._pipe.send(self.figures)
        try:
            self._pipe.recv()
        except EOFError:
            os._exit(0)  # skips the contender's own end, which may save models
        self.figures = IterationFigures()
        self._last_lap = _seconds()

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to a phase."""
        before = self._last_lap
        self._last_lap = _seconds()
        self.figures.cpu_seconds[name] += self._last_lap[0] - before[0]
        self.figures.wall_seconds[name] += self._last_lap[1] - before[1]

    def measured(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, whose CPU seconds are added up under a name.

        Those of a measured function that it calls count under that function's name alone.
        """

        @wraps(function)
        def measured_function(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.process_time()
            before = self._nested_seconds
            self._nested_seconds = 0.0
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.process_time() - start
                self.figures.function_seconds[name] += seconds - self._nested_seconds
                self._nested_seconds = before + seconds

        return measured_function

    def end(self, tokens: float) -> None:
        """Ends an iteration and sends its figures.

        Args:
            tokens: tokens of all its responses.
        """
        assert self._peak is not None
        self.lap("rest")
        self.figures.cpu_seconds["total"] = sum(self.figures.cpu_seconds.values())
        self.figures.wall_seconds["total"] = sum(self.figures.wall_seconds.values())
        peak = self._peak.bytes() / MB
        held = self._peak.before / MB
        self._pipe.send(replace(self.figures, peak_mb=peak, tokens=tokens, held_mb=held))


def _seconds() -> tuple[float, float]:
    """CPU and wall time when the GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.process_time(), time.perf_counter()
