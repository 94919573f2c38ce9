# SPDX-License-Identifier: Apache-2.0
"""Programs for problems, run on their tests: the file, and what an interruption leaves."""

import pytest

from cli_runs import read_jsonl
from dschat.errors import UserError
from dschat.inference import programs as programs_module
from dschat.inference.options import ProgramOptions
from dschat.inference.programs import run_programs
from dschat.scoring.programs.levels import weakness

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces")),
]


@pytest.fixture
def options(project, tmp_path, monkeypatch):
    """options(**changes): a short run on the held-out problems of APPS."""
    monkeypatch.setenv("MA_RLHF_DATA", str(project / "data"))
    plain = {"model": str(project / "run"), "max_new_tokens": 8, "device": "cpu", "num_return": 2, "batch_size": 5}
    return lambda **changes: ProgramOptions(**(plain | {"proj_path": tmp_path, "sandbox_workers": 2} | changes))


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


def test_an_interrupted_run_gives_the_same_file(options, tmp_path, monkeypatch):
    whole, stopped = options(num_samples=15), options(num_samples=15, proj_path=tmp_path / "stopped")
    run_programs(whole)
    original, batches = programs_module.respond_and_run, []

    class Killed(BaseException):
        """Stands for a signal."""

    def work(*arguments):
        if len(batches) == 1:
            raise Killed
        batches.append(arguments)
        return original(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(programs_module, "respond_and_run", work)
        run_programs(stopped)
    assert stopped.result_path.with_name("run.jsonl.partial").exists()
    run_programs(stopped)
    assert stopped.result_path.read_bytes() == whole.result_path.read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sandbox_level": "none"}, "--sandbox-level none: must be one of bubblewrap, namespaces, rlimits"),
        ({"sandbox_workers": 0}, "--sandbox-workers 0: must be at least 1"),
        ({"max_tests": 0}, "--max-tests 0: must be at least 1"),
        ({"temperature": "0"}, "--num-return 2: --temperature 0 gives the same"),
    ],
)
def test_bad_flags(options, changes, message):
    with pytest.raises(UserError, match=message):
        options(**changes)
