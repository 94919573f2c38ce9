# SPDX-License-Identifier: Apache-2.0
"""Runs a matrix in several processes; what is done stays done."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dschat.common.atomic import remove, write_file
from trials.spec import Spec

Result = dict[str, Any]
_OPEN = ExitStack()  # what a process holds until it ends


class Results:
    """A folder of finished runs."""

    def __init__(self, folder: Path) -> None:
        """Takes the folder of the whole benchmark."""
        self.folder = folder

    def file(self, spec: Spec) -> Path:
        """Of one run."""
        return self.folder / "results" / f"{spec.key}.json"

    def read(self, spec: Spec) -> Result | None:
        """A run's curves; None if it is not finished."""
        try:
            return json.loads(self.file(spec).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def write(self, spec: Spec, result: Result) -> None:
        """Whole, or not at all."""
        write_file(self.file(spec), json.dumps(result) + "\n")


def run_all(specs: Sequence[Spec], results: Results, jobs: int) -> None:
    """Runs what is not finished, so many at a time; a bar shows the time that is left.

    Raises:
        RuntimeError: a run failed; the others that were under way are finished first.
    """
    left = [spec for spec in specs if results.read(spec) is None]
    with tqdm(total=sum(spec.cost for spec in specs), desc="runs", unit="token", unit_scale=True) as bar:
        bar.update(bar.total - sum(spec.cost for spec in left))
        bar.initial = bar.n  # what was done before says nothing of the speed
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context, initializer=_begin) as pool:
            under_way = {pool.submit(_run, spec, results): spec for spec in left}
            done = len(specs) - len(left)
            for future in as_completed(under_way):
                if future.exception() is not None:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise RuntimeError(f"{under_way[future]} failed") from future.exception()
                done += 1
                bar.set_postfix_str(f"{done}/{len(specs)} runs")
                bar.update(under_way[future].cost)


def _begin() -> None:
    """A process that runs one spec after another; it imports, and joins a process group of its own, once."""
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch
    import transformers

    from dschat.engine.process_group import process_group

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    _OPEN.enter_context(process_group())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(spec: Spec, results: Results) -> None:
    from trials.runner import run
    from trials.starts import Starts

    scratch = results.folder / "scratch" / str(os.getpid())
    results.write(spec, run(spec, Starts(results.folder / "starts"), scratch))
    remove(scratch)
