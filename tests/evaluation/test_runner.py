# SPDX-License-Identifier: Apache-2.0
"""The batch runner by itself: parts in order, what an interruption leaves, and what is there before the file."""

import pytest

from cli_runs import read_jsonl
from dschat.base.errors import UserError
from dschat.evaluation.runner import RunPart, in_batches, run_batches
from killed_commands import rows_kept


class Work:
    """Two parts of four rows each, in batches of two; every row is its number and its part's letter."""

    def __init__(self, stops_at=None):
        self.opened, self.done, self.stops_at = [], [], stops_at

    def part(self, letter):
        def prepare():
            self.opened.append(letter)
            return lambda numbers: [self.row(letter, number) for number in numbers]

        return RunPart(batches=[[3, 1], [2, 0]], prepare=prepare, columns={"letter": letter})

    def row(self, letter, number):
        if (letter, number) == self.stops_at:
            raise KeyboardInterrupt
        self.done.append((letter, number))
        return {"number": number, "row": {"text": f"{letter}{number}"}}

    def run(self, path, conclude=None, **settings):
        def rows_of(entries):
            return [entry["row"] for entry in entries], f"{len(entries)} rows"

        return run_batches(path, settings, False, map(self.part, "ab"), conclude or rows_of)


def test_parts_in_order_and_rows_by_number(tmp_path):
    work, path = Work(), tmp_path / "rows.jsonl"
    assert work.run(path) == "8 rows"
    assert [row["text"] for row in read_jsonl(path)] == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    assert work.done == [(letter, number) for letter in "ab" for number in (3, 1, 2, 0)]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_was_kept_is_not_done_again_and_a_batch_that_was_cut_is_done_as_a_whole(tmp_path):
    path, partial = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.partial"
    with pytest.raises(KeyboardInterrupt):
        Work(stops_at=("b", 0)).run(path)
    assert rows_kept(partial) == 6 and not path.exists()
    partial.write_bytes(partial.read_bytes()[:-1])  # a kill while the last row, b1, was written
    work = Work()
    work.run(path)
    assert work.opened == ["b"], "nothing was left of the first part"
    assert work.done == [("b", 3), ("b", 1), ("b", 2), ("b", 0)]
    assert [row["text"] for row in read_jsonl(path)] == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]


def test_a_conclusion_that_fails_leaves_the_rows_for_the_next_run(tmp_path):
    def fails(entries):
        raise UserError("the disk is full")

    path = tmp_path / "rows.jsonl"
    with pytest.raises(UserError, match="the disk is full"):
        Work().run(path, fails)
    assert not path.exists()
    work = Work()
    work.run(path)
    assert work.opened == work.done == [] and len(read_jsonl(path)) == 8


def test_the_longest_come_first_and_equal_ones_stay_in_order():
    assert in_batches([0, 1, 2, 3, 4], 2, [5, 9, 5, 9, 1]) == [[1, 3], [0, 2], [4]]
    assert in_batches(range(5), 2) == [[0, 1], [2, 3], [4]]
