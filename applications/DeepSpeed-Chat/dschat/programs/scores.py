# SPDX-License-Identifier: Apache-2.0
"""Scores responses that are programs by the tests of their rows."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.programs.blocks import ProgramBlock, program_of
from dschat.programs.problem import parse_problem
from dschat.programs.run import STATUSES, ProgramOutcome, ProgramPool, paper_reward, ratio_reward
from dschat.programs.segment_rewards import rewards_by_segment, rewards_of_tests
from dschat.run.distributed import gather_objects
from dschat.scoring.source import Measured, ResponseTexts, Scores
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

COLUMN = "input_output"  # column of a row's tests
REWARDS: dict[str, Callable[[ProgramOutcome], float]] = {"paper": paper_reward, "ratio": ratio_reward}


class ProgramScores:
    """Scores from running the program in each response; without score if its sandbox cannot be started."""

    model: None = None  # the self-check has no model to compare

    def __init__(self, pool: ProgramPool, reward: str, skips: bool = False, which: ProgramBlock = "last") -> None:
        """Takes a pool.

        Args:
            pool: runs programs.
            reward: "paper" or "ratio".
            skips: continue even if a process could run none of its programs.
            which: see `dschat.programs.blocks.find_program`.
        """
        self._pool = pool
        self._reward = reward
        self._skips = skips
        self._which = which

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Scores:
        """One number for each response. Every rank must call it. Raises UserError on all ranks alike.

        The program of an episode is in the policy's last reply.
        """
        start = time.monotonic()
        outcomes = self._run(texts)
        seconds = time.monotonic() - start
        self._report_invalid(outcomes)

        reward = REWARDS[self._reward]
        missing = torch.tensor([outcome.status == "invalid" for outcome in outcomes], dtype=torch.bool)
        values = torch.tensor([0.0 if outcome.status == "invalid" else reward(outcome) for outcome in outcomes])
        values[missing] = values[~missing].mean()  # so that the mean of the rollout does not change

        device = rollout.input_ids.device
        return Scores(
            values.to(device),
            missing.to(device) if missing.any() else None,
            _measured(outcomes[: texts.counted], seconds),
            segments=self._segment_rewards(outcomes, texts, device),
        )

    def _run(self, texts: ResponseTexts) -> list[ProgramOutcome]:
        """Runs the program of each response on the tests of its row."""
        programs: list[str | None] = []
        for response, prompt in zip(texts.last_replies, texts.prompts, strict=True):
            programs.append(program_of(response, self._which, prompt))
        tests = [tests_of(row) for row in texts.rows]
        return self._pool.run(programs, tests, [row.origin for row in texts.rows])

    def _report_invalid(self, outcomes: Sequence[ProgramOutcome]) -> None:
        """Warns about programs that could not be run; raises UserError on all ranks if all of a rank's could not."""
        problems = []
        for outcome in outcomes:
            if outcome.status == "invalid":
                problems.append(outcome.message or "no tests")
        if problems:
            logger.warning("%d of %d programs could not be run: %s.", len(problems), len(outcomes), problems[0])
        all_failed = len(problems) == len(outcomes)
        rank_problems = gather_objects(problems[0] if problems and all_failed else None)
        for rank, problem in enumerate(rank_problems):
            if problem is not None and not self._skips:
                raise UserError(
                    f"no program of rank {rank} could be run: {problem}. Lower --sandbox_workers, free memory, or "
                    "give --on_reward_error skip."
                )

    def _segment_rewards(
        self, outcomes: Sequence[ProgramOutcome], texts: ResponseTexts, device: torch.device
    ) -> Tensor | None:
        """Shape (B, M): the rewards of macro actions, 0 where no program could be run; None without segments."""
        segments = texts.segments
        if segments is None:
            return None
        numbers = []
        for row, outcome in enumerate(outcomes):
            if outcome.status == "invalid":
                numbers.append([0.0] * len(segments.texts[row]))
                continue
            data_row = texts.rows[row]
            functions = [case.function for case in self._pool.cases(tests_of(data_row), data_row.origin)]
            tests = rewards_of_tests(outcome, self._reward)
            prompt = texts.prompts[row]
            numbers.append(rewards_by_segment(tests, functions, segments.texts[row], self._which, prompt))
        # These numbers are rewards even if other sources score prefixes.
        _, rewards = replace(segments, by_prefix=False).rewards(numbers)
        return rewards.to(device)


def tests_of(row: Row) -> str:
    """A row's column of tests, as JSON text; empty if it holds null. Raises UserError if there is no such column."""
    if COLUMN not in row.extra:
        raise UserError(
            f"{row.origin}: no column {COLUMN!r}, which holds the tests; add it, empty where there are none."
        )
    tests = row.extra[COLUMN]
    if isinstance(tests, str):
        return tests
    return "" if tests is None else json.dumps(tests, default=str)


def _measured(outcomes: Sequence[ProgramOutcome], seconds: float) -> Measured:
    """Metrics: shares of outcomes, tests per second, and seconds."""
    counts = Counter(outcome.status for outcome in outcomes)
    shares = {}
    for status in STATUSES:
        shares[f"programs/{status}"] = (float(counts[status]), float(len(outcomes)))
    tests = float(sum(len(outcome.tests) for outcome in outcomes))
    return shares | {"programs/tests_per_second": (tests, seconds)}


def has_tests(row: Row) -> bool:
    """Whether a row has a test. Raises UserError if its column of tests, or one of them, has another form."""
    return bool(parse_problem(tests_of(row), row.origin).cases)
