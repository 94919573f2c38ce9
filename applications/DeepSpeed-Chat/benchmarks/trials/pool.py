# SPDX-License-Identifier: Apache-2.0
"""Runs of the matrix in several processes at a time; a run that is finished is not repeated."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict

from tqdm import tqdm

from dschat.base.atomic import write_file
from trials.matrix import Results, Spec

_UNTIL_EXIT = ExitStack()  # contexts that a process holds until it ends


def run_all(specs: Sequence[Spec], results: Results, jobs: int) -> None:
    """Makes the runs that are not finished, so many at a time; a bar shows the remaining time.

    Raises:
        RuntimeError: a run failed; the others that were under way are finished first.
    """
    unfinished = [spec for spec in specs if results.read(spec) is None]
    with tqdm(total=len(specs), initial=len(specs) - len(unfinished), desc="runs") as bar:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare_process) as pool:
            specs_under_way = {pool.submit(make_run, spec, results): spec for spec in unfinished}
            for future in as_completed(specs_under_way):
                if future.exception() is not None:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise RuntimeError(f"{specs_under_way[future]} failed") from future.exception()
                bar.update()


def make_run(spec: Spec, results: Results) -> None:
    """Makes one run and writes its result, in a process that `_prepare_process` has prepared."""
    from trials.runner import run
    from trials.starts import Starts

    scratch = results.folder / "scratch" / str(os.getpid())
    result = run(spec, Starts(results.folder / "starts"), scratch)
    file = results.file(spec)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, json.dumps(asdict(result)) + "\n")
    shutil.rmtree(scratch, ignore_errors=True)


def _prepare_process() -> None:
    """Sets one thread and joins a process group, once for all runs that the process will make."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch
    import transformers

    from dschat.engine.process_group import process_group

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    _UNTIL_EXIT.enter_context(process_group())


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
