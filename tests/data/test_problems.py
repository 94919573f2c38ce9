# SPDX-License-Identifier: Apache-2.0
"""Small problems made by code: every right solution passes its tests, most demonstrations do not."""

import json

import pytest

from dschat.data.formats.published import apps_row
from dschat.data.problems import FRAMES, PROBLEMS, make_row, write_problems
from dschat.scoring.programs.levels import weakness
from dschat.scoring.programs.run import ProgramPool

needs_walls = pytest.mark.skipif(bool(weakness("namespaces")), reason="no sandbox: " + weakness("namespaces"))


def test_there_are_128_problems_of_both_kinds():
    # 4 quantities, 3 joints: 48 printed, 48 returned, 16 lists, 16 of words.
    assert len(PROBLEMS) == len(set(PROBLEMS)) == 128
    assert {bool(frame.starter) for frame in FRAMES} == {True, False}


@needs_walls
@pytest.mark.xdist_group("sandbox")
def test_right_solutions_pass_and_most_demonstrations_do_not():
    pool = ProgramPool("namespaces", workers=2)
    passed = {}
    for kind in ("problems", "demonstrations"):
        rows = [apps_row(make_row(index, 3, kind), f"row {index}") for index in range(60)]
        found = pool.run([row.chosen for row in rows], [row.extra["input_output"] for row in rows], ["row"] * 60)
        passed[kind] = sum(outcome.status == "passed" for outcome in found)
    assert passed["problems"] == 60 and 3 <= passed["demonstrations"] <= 30


def test_sources(tmp_path):
    write_problems(tmp_path, 8, 6, 4, seed=1)
    sizes = {
        file.relative_to(tmp_path).as_posix(): len(file.read_text().splitlines()) for file in tmp_path.rglob("*.jsonl")
    }
    assert sizes == {
        "demonstrations/train.jsonl": 8,
        "demonstrations/test.jsonl": 4,
        "problems/train.jsonl": 6,
        "problems/test.jsonl": 4,
    }
    first = (tmp_path / "problems" / "train.jsonl").read_text()
    write_problems(tmp_path, 8, 6, 4, seed=1)
    assert (tmp_path / "problems" / "train.jsonl").read_text() == first
    row = json.loads(first.splitlines()[0])
    assert set(row) == {"id", "question", "solutions", "input_output", "difficulty", "url", "starter_code"}
