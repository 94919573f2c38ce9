# SPDX-License-Identifier: Apache-2.0
"""Do the reference solutions of problems pass their own tests?"""

from __future__ import annotations

from collections.abc import Sequence

from dschat.data.rows import Row
from dschat.scoring.programs.outcome import Outcome
from dschat.scoring.programs.pool import ProgramPool
from dschat.scoring.programs.problem import parse_problem
from dschat.scoring.programs.scores import tests_of


def has_tests(row: Row) -> bool:
    """Whether a row has a test; raises UserError where its column of tests holds something else."""
    return bool(parse_problem(tests_of(row), row.origin, most=1).cases)


def run_solutions(rows: Sequence[Row], pool: ProgramPool) -> dict[int, Outcome]:
    """Runs the first reference solution of each row that has one.

    Args:
        rows: problems with tests.
        pool: runs them.

    Returns:
        Number of the row → outcome.
    """
    numbers = [number for number, row in enumerate(rows) if row.chosen is not None]
    chosen = [rows[number] for number in numbers]
    tests, origins = [tests_of(row) for row in chosen], [row.origin for row in chosen]
    return dict(zip(numbers, pool.run([row.chosen or "" for row in chosen], tests, origins), strict=True))


def solutions_report(rows: Sequence[Row], pool: ProgramPool) -> list[str]:
    """Lines: how many of the rows have tests and a solution, how many of these fail, and which.

    Raises:
        UserError: a row's tests are of another form.
    """
    tested = [row for row in rows if has_tests(row)]
    outcomes = run_solutions(tested, pool)
    failed = {i: found for i, found in outcomes.items() if found.status != "passed"}
    untested, unsolved = len(rows) - len(tested), len(tested) - len(outcomes)
    lines = [
        f"{len(rows):,} rows: {untested:,} without tests, {unsolved:,} without a solution",
        f"{len(outcomes) - len(failed):,} of {len(outcomes):,} solutions pass",
    ]
    if failed:
        lines.append("these fail, and --drop_unsolvable leaves them out of step 3:")
    return lines + [f"{tested[i].origin}: {found.status} {found.message}".rstrip() for i, found in failed.items()]
