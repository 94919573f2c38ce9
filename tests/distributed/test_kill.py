# SPDX-License-Identifier: Apache-2.0
"""A process that dies takes the run with it, and the launcher says which it was."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_runs import STEPS, TIMEOUT, arguments
from dschat.models.tiny import make_model
from dschat.quickstart.synthetic import make_rows, row_texts, write_corpus
from launches import pids_of, start
from real_size import as_large_as

pytestmark = pytest.mark.xdist_group("launcher")


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def rows_of(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.slow
def test_killing_a_rank_ends_the_run_and_names_it(tmp_path: Path) -> None:
    write_corpus(tmp_path / "data", 32, 8, 8, seed=1)
    texts = row_texts(make_rows(50, 1, "demonstrations"))
    make_model(tmp_path / "model", texts, seed=1, hidden_size=32, layers=1, vocab_size=300)
    flags = {
        "data_path": tmp_path / "data" / "demonstrations",
        "data_split": "1,0,0",
        "model_name_or_path": tmp_path / "model",
        "output_dir": tmp_path / "out",
        "per_device_train_batch_size": 2,
        "num_train_epochs": 10_000,
        "zero_stage": 3,
        "deepspeed_config": as_large_as(7e9, tmp_path / "model"),
    }
    metrics = tmp_path / "out" / "metrics.jsonl"
    with start(STEPS["sft"] / "main.py", arguments(flags)) as process:
        try:
            pids, seen = pids_of(process)
            wait_for(lambda: rows_of(metrics) > 3 or process.poll() is not None, TIMEOUT)
            trains = process.poll() is None
            if trains:
                os.kill(pids[1], signal.SIGKILL)
            killed = time.monotonic()
            rest, _ = process.communicate(timeout=TIMEOUT)
        except (subprocess.TimeoutExpired, AssertionError):
            process.terminate()
            raise
    seconds = time.monotonic() - killed
    output = seen + rest
    assert trains, output
    assert seconds < 60
    assert process.returncode != 0
    assert not any(alive(pid) for pid in pids)
    last = [line for line in output.splitlines() if "--local_rank=1" in line][-1]
    assert "exits with return code" in last, output
