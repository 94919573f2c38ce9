# SPDX-License-Identifier: Apache-2.0
"""Shared by all benchmarks: flags, processes, memory, and figures as JSON and in documents.

Imports torch but not dschat, because TRL's process uses it, too.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import platform
import runpy
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed prints that it found no GPU

MB = 1e6  # bytes
GB = 1e9  # bytes
SAMPLE_SECONDS = 0.002  # between two readings of the memory
C = ctypes.CDLL(None)
MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


def gpus() -> list[str]:
    """Names of this machine's GPUs."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def cpu() -> str:
    """The processor's name on Linux, otherwise its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def machine() -> dict[str, object]:
    """Processor, cores, GPUs and versions of this process."""
    return {
        "cpu": cpu(),
        "cpu_cores": os.cpu_count(),
        "gpus": gpus(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def settings_parser(doc: str | None, document: str = "", **numbers: float) -> argparse.ArgumentParser:
    """A parser that describes a script by the first line of its docstring.

    Args:
        doc: the docstring of the script.
        document: the sections that --markdown writes; without them there is no such flag.
        numbers: numeric flags with their defaults.
    """
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0], formatter_class=defaults)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="a number")
    if document:
        parser.add_argument("--markdown", type=Path, help=f"document whose {document} replaced")
    return parser


def report(settings: argparse.Namespace, figures: object) -> None:
    """Prints one JSON object: machine, settings, figures."""
    used = {name: value for name, value in vars(settings).items() if name != "markdown"}
    content = {"machine": machine(), "settings": used, "figures": figures}
    print(json.dumps(content, indent=2, default=str), flush=True)


def origin() -> str:
    """The origin of figures: this process's command line, the machine and today's date."""
    command = " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
    hardware = ", ".join([*gpus(), f"{os.cpu_count()} cores of {cpu()}"])
    versions = f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    return f"`{command}`\n\n{hardware}; {versions}; {date.today().isoformat()}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_section(document: Path, name: str, text: str) -> None:
    """Puts text between the comments <!-- name --> and <!-- /name --> of a document.

    Raises:
        ValueError: it has no such comments.
    """
    opening = f"<!-- {name} -->"
    closing = f"<!-- /{name} -->"
    before, begin, rest = document.read_text(encoding="utf-8").partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end:
        raise ValueError(f"{document} has no section between {opening} and {closing}")
    document.write_text(f"{before}{opening}\n{text}\n{closing}{after}", encoding="utf-8")


def in_process(work: Callable[[*Ts], R], *args: *Ts) -> R:
    """Runs a function in a new process; what it prints goes to standard error."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), os.dup2, (2, 1)) as pool:
        return pool.submit(work, *args).result()


def run_step(folder: str, flags: Sequence[object], program: str = "main.py") -> None:
    """Runs a program of a step in this process, as its command line does; a failure ends the process."""
    from dschat.quickstart.subcommands import TRAINING

    sys.argv = [str(TRAINING / folder / program), *map(str, flags)]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


class Peak:
    """The peak of this process's memory since this object was created, above what was in use then.

    On a CPU this is resident memory. Linux records the maximum itself (VmHWM), so that no peak is missed; writing 5 to
    /proc/self/clear_refs resets it to the current value. ru_maxrss would be wrong: a child inherits its parent's. On a
    GPU it is the memory that was allocated there.
    """

    def __init__(self, cuda: bool) -> None:
        give_back()
        self._cuda = cuda
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self.before = _status_bytes("VmRSS")

    def bytes(self) -> int:
        """The peak so far."""
        highest = torch.cuda.max_memory_allocated() if self._cuda else _status_bytes("VmHWM")
        return highest - self.before


class SampledPeak:
    """The highest reading of memory since this object was created, above the reading at that time.

    A thread reads it at short intervals.
    """

    def __init__(self, read: Callable[[], int], interval: float = SAMPLE_SECONDS) -> None:
        give_back()
        self._read = read
        self._interval = interval
        self._before = read()
        self._highest = self._before
        threading.Thread(target=self._watch, daemon=True).start()

    def bytes(self) -> int:
        """The peak so far."""
        return max(self._highest, self._read()) - self._before

    def _watch(self) -> None:
        while True:
            time.sleep(self._interval)
            self._highest = max(self._highest, self._read())


def own_bytes() -> int:
    """Resident memory without mapped files, whose pages the system takes back when it needs them."""
    return _status_bytes("RssAnon") + _status_bytes("RssShmem")


def give_back_at_once() -> None:
    """Makes the C library return tensors of 1 MB and more to the system as soon as they are freed."""
    C.mallopt(MMAP_THRESHOLD, 1_000_000)


def give_back() -> None:
    """Returns free memory to the system."""
    gc.collect()
    if hasattr(C, "malloc_trim"):  # glibc only
        C.malloc_trim(0)


def _status_bytes(name: str) -> int:
    """A size in /proc/self/status, which counts in KiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
