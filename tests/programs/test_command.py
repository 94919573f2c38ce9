# SPDX-License-Identifier: Apache-2.0
"""Programs for problems, run on their tests: the file, and what an interruption leaves."""

import pytest

from cli_runs import read_jsonl
from dschat.base.errors import UserError
from dschat.programs import command as programs
from dschat.programs.command import run_programs
from dschat.programs.levels import weakness
from dschat.programs.options import ProgramOptions

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces")),
]


@pytest.fixture
def options(plain):
    """options(**changes): a short run on the held-out problems of APPS."""
    flags = {name: plain[name] for name in ("proj_path", "model", "device")}
    flags |= {"max_new_tokens": 8, "num_return": 2, "batch_size": 5, "sandbox_workers": 2}
    return lambda **changes: ProgramOptions(**(flags | changes))


def test_every_problem_with_tests_is_answered_and_run(options):
    chosen = options()
    line = run_programs(chosen)
    rows = read_jsonl(chosen.result_path)
    assert chosen.result_path.parts[-3:] == ("apps", "temperature=1.0", "run.jsonl")
    assert line.startswith(f"{len(rows)} problems (") and "1 of them without tests" in line
    assert {row["difficulty"] for row in rows} == {"introductory", "interview", "competition"}
    assert {row["dataset"] for row in rows} == {"apps"}
    statuses = {sample["status"] for row in rows for sample in row["samples"]}
    assert all(len(row["samples"]) == 2 for row in rows) and statuses <= {"compile_error", "runtime_error", "wrong"}
    with pytest.raises(UserError, match="exists, finished"):
        run_programs(chosen)


def test_rows_do_not_call_another_place_by_the_name_of_the_published_set(options, project):
    (place,) = (project / "data").glob("apps*")
    chosen = options(data_path=str(place), num_samples=2)
    run_programs(chosen)
    assert {row["dataset"] for row in read_jsonl(chosen.result_path)} == {""}


def test_an_interrupted_run_gives_the_same_file(options, tmp_path, interrupt):
    whole, stopped = options(num_samples=15), options(num_samples=15, proj_path=tmp_path / "stopped")
    run_programs(whole)
    interrupt(programs, "respond_and_run", 1)
    with pytest.raises(KeyboardInterrupt):
        run_programs(stopped)
    assert stopped.result_path.with_name("run.jsonl.partial").exists()
    interrupt(programs, "respond_and_run")
    run_programs(stopped)
    assert stopped.result_path.read_bytes() == whole.result_path.read_bytes()
