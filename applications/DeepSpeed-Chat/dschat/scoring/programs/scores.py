# SPDX-License-Identifier: Apache-2.0
"""Scores of responses that are programs: what became of them on the tests of their rows."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.rl.types import Rollout
from dschat.run.distributed import gather_objects
from dschat.scoring.programs.problem import parse_problem
from dschat.scoring.programs.run import STATUSES, ProgramOutcome, ProgramPool, paper_reward, ratio_reward
from dschat.scoring.source import Measured, ResponseTexts, Scores

logger = logging.getLogger(__name__)

COLUMN = "input_output"
# Fenced blocks, each with the first word behind its fence; one that is never closed goes to the end.
BLOCK = re.compile(r"^```[ \t]*([^\s`]*)[^\n]*\n(.*?)(?:^```[ \t]*\r?$|\Z)", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"(python|py)?[\d.]*", re.IGNORECASE)


def program_of(response: str) -> str:
    """The first fenced block that names Python or nothing; the whole response where there is none."""
    for tag, block in BLOCK.findall(response):
        if PYTHON.fullmatch(tag):
            return str(block)
    return response


REWARDS: dict[str, Callable[[ProgramOutcome], float]] = {"paper": paper_reward, "ratio": ratio_reward}


class ProgramScores:
    """Runs the program in each response; a sandbox that cannot be started leaves its row without a score."""

    model: None = None  # no model, so that the self-check has nothing to compare

    def __init__(self, pool: ProgramPool, reward: str, skips: bool = False) -> None:
        """Takes what runs programs, `paper` or `ratio`, and whether to go on where a process could run none of its."""
        self._pool, self._reward, self._skips = pool, REWARDS[reward], skips

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Scores:
        """One number for each response. Every rank must call it. Raises UserError, on all ranks alike."""
        begun = time.monotonic()
        programs, rows = [program_of(response) for response in texts.responses], texts.rows
        outcomes = self._pool.run(programs, [tests_of(row) for row in rows], [row.origin for row in rows])
        seconds = time.monotonic() - begun
        device = rollout.input_ids.device
        missing = torch.tensor([outcome.status == "invalid" for outcome in outcomes])
        problem = next((outcome.message or "no tests" for outcome in outcomes if outcome.status == "invalid"), None)
        if problem is not None:
            logger.warning("%d of %d programs could not be run: %s.", int(missing.sum()), len(missing), problem)
        for owner, found in enumerate(gather_objects(problem if missing.all() else None)):
            if found is not None and not self._skips:
                raise UserError(
                    f"no program of rank {owner} could be run: {found}. Lower --sandbox_workers, free memory, or give "
                    "--on_reward_error skip."
                )
        values = torch.tensor([0.0 if outcome.status == "invalid" else self._reward(outcome) for outcome in outcomes])
        # The mean of the others leaves the mean of the rollout as it is.
        values[missing] = values[~missing].mean()
        return Scores(values.to(device), missing.to(device) if missing.any() else None, _measured(outcomes, seconds))


def tests_of(row: Row) -> str:
    """A row's column of tests, as JSON text. Raises UserError where it has none."""
    tests = row.extra.get(COLUMN)
    if not isinstance(tests, str):
        raise UserError(f"{row.origin}: there is no text in column {COLUMN!r}: --reward_source programs needs tests.")
    return tests


def _measured(outcomes: Sequence[ProgramOutcome], seconds: float) -> Measured:
    """Shares of the outcomes, tests per second, and the seconds that running took."""
    counts = Counter(outcome.status for outcome in outcomes)
    shares = {f"programs/{status}": (float(counts[status]), float(len(outcomes))) for status in STATUSES}
    tests = float(sum(len(outcome.tests) for outcome in outcomes))
    return shares | {"programs/tests_per_second": (tests, seconds), "programs/seconds": (seconds, 1.0)}


def has_tests(row: Row) -> bool:
    """Whether a row has a test; raises UserError where its column of tests holds something else."""
    return bool(parse_problem(tests_of(row), row.origin, most=1).cases)


def run_solutions(rows: Sequence[Row], pool: ProgramPool) -> dict[int, ProgramOutcome]:
    """Runs the first reference solution of each row that has one.

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
