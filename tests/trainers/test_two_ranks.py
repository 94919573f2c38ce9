# SPDX-License-Identifier: Apache-2.0
"""Two processes make the updates of one, without a launcher. tests/distributed looks at every ZeRO stage."""

import json
import multiprocessing
import runpy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cli_runs import PRELOADED, TIMEOUT
from closeness import UPDATE, WEIGHT_GAP, near
from factories import largest_difference
from launches import WORKERS, free_port, launch_environment
from recorded import Case, run_case

CASE = Case(0, 1)
SCRIPT = """
import os, runpy, sys
os.environ.update({variables!r})
sys.argv = ["workers.py", {folder!r}, "updates"]
runpy.run_path({workers!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.xdist_group("launcher")
def test_two_processes_make_the_updates_of_one(group: None, tmp_path: Path) -> None:
    """All three steps: weights within 1e-5 after each update, and the same losses and gradient norms."""
    (tmp_path / "cases.json").write_text(json.dumps([vars(CASE)]))
    group_of_two = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    processes = []
    for rank in ("0", "1"):
        script = tmp_path / f"rank{rank}.py"
        variables = launch_environment(**group_of_two, RANK=rank, LOCAL_RANK=rank)
        script.write_text(SCRIPT.format(variables=variables, folder=str(tmp_path), workers=str(WORKERS)))
        processes.append(context.Process(target=runpy.run_path, args=(str(script),)))
        processes[-1].start()
    expected, metrics = run_case(Case(), tmp_path / "alone")
    for process in processes:
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    assert largest_difference(load_file(tmp_path / f"updates-{CASE.name}-0.safetensors"), expected) < WEIGHT_GAP
    for rank in (0, 1):
        found = json.loads((tmp_path / f"updates-{CASE.name}-{rank}.json").read_text())
        assert {name: found[name] for name in metrics} == near(metrics, UPDATE, scale=0.1)
