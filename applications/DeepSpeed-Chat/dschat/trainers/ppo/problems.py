# SPDX-License-Identifier: Apache-2.0
"""Problems that a program can be tested on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dschat.data.formats.rows import Row
from dschat.run.distributed import gather_objects, rank, world_size
from dschat.scoring.programs.pool import ProgramPool
from dschat.scoring.programs.problem import parse_problem
from dschat.scoring.programs.scores import tests_of

# Why a row is left out.
NO_TESTS = "no tests"
UNSOLVED = "its own solution fails its tests"


def rows_with_tests(
    rows: Sequence[Row], pool: ProgramPool, drop_unsolvable: bool = False
) -> tuple[list[Row], Counter[str]]:
    """Rows that have a test and, if asked for, whose first reference solution passes; one without any counts as such.

    Args:
        rows: with the column `input_output`.
        pool: runs the solutions; the processes share them.
        drop_unsolvable: run the solutions.

    Returns:
        The rows in their order; reason → number of the others.

    Raises:
        UserError: a row's tests are of another form.
    """
    tested = [row for row in rows if parse_problem(tests_of(row), row.origin, most=1).cases]
    dropped = Counter({NO_TESTS: len(rows) - len(tested)})
    if drop_unsolvable:
        own = list(enumerate(tested))[rank() :: world_size()]
        solved = [(number, row, row.chosen) for number, row in own if row.chosen is not None]
        solutions = [solution for _, _, solution in solved]
        outcomes = pool.run(solutions, [tests_of(row) for _, row, _ in solved], [row.origin for _, row, _ in solved])
        verdicts = zip(solved, outcomes, strict=True)
        failed = {number for (number, _, _), found in verdicts if found.status not in ("passed", "invalid")}
        everywhere = set().union(*gather_objects(failed))
        dropped[UNSOLVED] = len(everywhere)
        tested = [row for number, row in enumerate(tested) if number not in everywhere]
    return tested, +dropped
