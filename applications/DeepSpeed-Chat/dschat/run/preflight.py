# SPDX-License-Identifier: Apache-2.0
"""Compares all processes before anything is loaded, so that what would fail after minutes fails at once."""

import importlib.metadata
import os
import socket
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from dschat.errors import UserError
from dschat.run.distributed import barrier, broadcast_object, gather_objects, is_main, rank

PACKAGES = ("torch", "transformers", "deepspeed", "peft", "numpy")


@dataclass(frozen=True)
class ProcessReport:
    """What one process sees."""

    rank: int
    host: str
    versions: tuple[tuple[str, str], ...]
    folder_problem: str | None  # why output_dir cannot be used
    free_memory: int  # bytes of main memory
    needed_memory: int  # bytes of weights that it holds in main memory at the same time


def preflight(output_dir: Path, models: Iterable[str | None]) -> None:
    """Compares all processes: package versions, output_dir writable and shared, enough main memory for the weights.

    Args:
        output_dir: of the run.
        models: paths of what will be loaded; hub names and None are passed over.

    Raises:
        UserError: on every rank, naming the rank that cannot go on.
    """
    problem = _folder_problem(output_dir)
    sizes = [_weights_size(Path(path)) for path in models if path]
    # With GPUs, a model is moved to its GPU before the next is loaded.
    needed = max(sizes, default=0) if torch.cuda.is_available() else sum(sizes)
    report = ProcessReport(
        rank=rank(),
        host=socket.gethostname(),
        versions=tuple((name, importlib.metadata.version(name)) for name in PACKAGES),
        folder_problem=problem,
        free_memory=psutil.virtual_memory().available,
        needed_memory=needed,
    )
    check_reports(gather_objects(report), output_dir)


def check_reports(reports: Sequence[ProcessReport], output_dir: Path) -> None:
    """Raises UserError at the first problem.

    Args:
        reports: of all ranks, in order.
        output_dir: for the message.
    """
    first = reports[0]
    processes = Counter(report.host for report in reports)
    for report in reports:
        where = f"rank {report.rank} ({report.host})"
        if report.folder_problem:
            raise UserError(f"--output_dir {output_dir}: {where}: {report.folder_problem}")
        for (name, version), (_, expected) in zip(report.versions, first.versions, strict=True):
            if version != expected:
                raise UserError(
                    f"{where} has {name} {version}, rank 0 ({first.host}) has {expected}: install the same "
                    "requirements.txt on every node."
                )
        available = report.free_memory // processes[report.host]
        if report.needed_memory > available:
            raise UserError(
                f"{where} can use {available / 1e9:.1f} GB of main memory ({processes[report.host]} processes share "
                f"the node), but the weights it loads take {report.needed_memory / 1e9:.1f} GB. Use fewer processes "
                "per node, smaller models, or free memory."
            )


def _folder_problem(output_dir: Path) -> str | None:
    """Writes a mark on the main process and looks for it on all."""
    mark = broadcast_object(f".preflight-{uuid.uuid4().hex}")
    problem = None
    if is_main():
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / mark).touch()
        except OSError as error:
            problem = f"cannot be written: {error}"
    main_problem = broadcast_object(problem)
    barrier()
    if main_problem is None and not (output_dir / mark).exists():
        problem = "does not see the folder that rank 0 writes to; it must lie on storage that all nodes share"
    elif main_problem is None and not os.access(output_dir, os.W_OK):
        problem = "cannot be written"
    barrier()
    if is_main() and main_problem is None:
        (output_dir / mark).unlink()
    return problem


def _weights_size(folder: Path) -> int:
    """Bytes of a local model's safetensors; 0 where there is no such folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
