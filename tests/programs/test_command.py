# SPDX-License-Identifier: Apache-2.0
"""Programs for problems, run on their tests: the file, and what an interruption leaves."""

import pytest

from cli_runs import read_jsonl
from dschat.base.errors import UserError
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
