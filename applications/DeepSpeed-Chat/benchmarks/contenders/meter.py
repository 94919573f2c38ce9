# SPDX-License-Identifier: Apache-2.0
"""CPU time, wall time and peak memory of one process, iteration by iteration.

CPU time is ``time.process_time``: seconds of all threads of this process, blind to what else the machine does. Memory
is counted from where it stood when everything was set up, before the first iteration, so that optimiser states count:

- CPU: resident memory. Linux keeps its highest value itself (VmHWM), so no peak falls between two samples; writing 5
  to /proc/self/clear_refs sets it back to the present one.
- CUDA: ``torch.cuda.max_memory_allocated``.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch

MB = 1e6  # bytes
T = TypeVar("T")


class Memory:
    """The peak since this object was made, above what was in use then."""

    def __init__(self) -> None:
        gc.collect()
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # glibc only
            trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self._before = _status_bytes("VmRSS")

    def peak(self) -> int:
        """Bytes."""
        return (torch.cuda.max_memory_allocated() if self._cuda else _status_bytes("VmHWM")) - self._before


def _status_bytes(name: str) -> int:
    """A line of /proc/self/status, which counts in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


class Meter:
    """Measures the iterations of this process, each when it is asked for.

    Without ``iterations``, each begins with a line on standard input and its figures are a line of JSON on standard
    output, which nothing else reaches any more; the end of the input ends the process. With ``iterations``, so many
    follow each other and the figures go to a file.
    """

    def __init__(self, folder: Path, iterations: int | None) -> None:
        """Takes standard output for itself.

        Args:
            folder: of the file meter-RANK.jsonl.
            iterations: how many there will be; None to do what standard input says.
        """
        self._left = iterations
        self._replies: TextIO
        if iterations is None:
            self._replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
            os.dup2(2, 1)
        else:
            file = folder / f"meter-{os.environ.get('RANK', '0')}.jsonl"
            self._replies = open(file, "w", encoding="utf-8")
        self._memory: Memory | None = None
        self._cpu: dict[str, float] = {}
        self._wall: dict[str, float] = {}
        self._inside: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._start = self._last = (0.0, 0.0)

    def begin(self) -> None:
        """Waits until an iteration is asked for; the first call says that everything is set up."""
        if self._memory is None:
            self._memory = Memory()
            self._reply({"ready": True})
        if self._left == 0 or (self._left is None and not sys.stdin.readline()):
            self._replies.flush()
            os._exit(0)  # without the contender's own farewell: it was not measured, and may write whole models
        if self._left is not None:
            self._left -= 1
        self._cpu, self._wall, self._inside, self._counts = {}, {}, {}, {}
        self._start = self._last = _now()

    def lap(self, name: str) -> None:
        """Books the time since the last lap under a phase."""
        now = _now()
        self._cpu[name] = self._cpu.get(name, 0.0) + now[0] - self._last[0]
        self._wall[name] = self._wall.get(name, 0.0) + now[1] - self._last[1]
        self._last = now

    def inside(self, name: str, work: Callable[..., T]) -> Callable[..., T]:
        """The same function; its CPU time is booked under a name beside the phases, as a part of one of them."""

        def run(*args: Any, **kwargs: Any) -> T:
            start = time.process_time()
            result = work(*args, **kwargs)
            self._inside[name] = self._inside.get(name, 0.0) + time.process_time() - start
            return result

        return run

    def count(self, name: str, number: int) -> None:
        """Adds to a count of this iteration."""
        self._counts[name] = self._counts.get(name, 0) + number

    def end(self, tokens: float) -> None:
        """Ends an iteration and hands over its figures.

        Args:
            tokens: of all its responses.
        """
        assert self._memory is not None
        self.lap("rest")
        figures = {
            "cpu": self._cpu | {"total": self._last[0] - self._start[0]},
            "wall": self._wall | {"total": self._last[1] - self._start[1]},
            "inside": self._inside,
            "counts": self._counts,
            "peak_mb": self._memory.peak() / MB,
            "tokens": tokens,
        }
        self._reply(figures)

    def _reply(self, content: dict[str, Any]) -> None:
        self._replies.write(json.dumps(content) + "\n")
        self._replies.flush()


def _now() -> tuple[float, float]:
    """Seconds of CPU and wall time, when the GPU has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.process_time(), time.perf_counter()
