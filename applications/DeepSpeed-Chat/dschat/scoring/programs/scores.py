# SPDX-License-Identifier: Apache-2.0
"""Scores of responses that are programs: what became of them on the tests of their rows."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from dschat.data.rows import Row
from dschat.errors import UserError
from dschat.rl.types import Rollout
from dschat.run.distributed import gather_objects
from dschat.scoring.programs.outcome import STATUSES, Outcome, paper_reward, ratio_reward
from dschat.scoring.programs.pool import ProgramPool
from dschat.scoring.programs.response import program_of
from dschat.scoring.source import Measured, ResponseTexts, Scores

logger = logging.getLogger(__name__)

COLUMN = "input_output"
REWARDS: dict[str, Callable[[Outcome], float]] = {"paper": paper_reward, "ratio": ratio_reward}


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
    """A row's column of tests, as JSON text.

    Raises:
        UserError: it has none.
    """
    tests = row.extra.get(COLUMN)
    if not isinstance(tests, str):
        raise UserError(f"{row.origin}: there is no text in column {COLUMN!r}: --reward_source programs needs tests.")
    return tests


def _measured(outcomes: Sequence[Outcome], seconds: float) -> Measured:
    """Shares of the outcomes, tests per second, and the seconds that running took."""
    counts = Counter(outcome.status for outcome in outcomes)
    shares = {f"programs/{status}": (float(counts[status]), float(len(outcomes))) for status in STATUSES}
    tests = float(sum(len(outcome.tests) for outcome in outcomes))
    return shares | {"programs/tests_per_second": (tests, seconds), "programs/seconds": (seconds, 1.0)}
