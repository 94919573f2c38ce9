# SPDX-License-Identifier: Apache-2.0
"""Scores responses that are programs by the tests of their rows."""

from __future__ import annotations

import json
import logging
import time
import tokenize
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from itertools import accumulate, pairwise

import torch

from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.programs.blocks import ProgramBlock, find_program, program_of
from dschat.programs.problem import parse_problem
from dschat.programs.run import STATUSES, ProgramOutcome, ProgramPool, paper_reward, ratio_reward
from dschat.run.distributed import gather_objects
from dschat.scoring.source import Measured, ResponseTexts, Scores
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

COLUMN = "input_output"
NON_CODE = (tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER)


def ends_of(
    response: str, functions: Collection[str | None], which: ProgramBlock = "last", prompt: str = ""
) -> dict[str | None, int]:
    """The ends of functions in a response's program, or of the program for those that it does not define.

    Args:
        response: response of a policy.
        functions: names of functions; None for the program.
        which: see `dschat.programs.blocks.find_program`.
        prompt: see there.

    Returns:
        For each function, the number of characters of the response up to its end; all of them without a program.
    """
    program = find_program(response, which, prompt)
    if program is None:
        return dict.fromkeys(functions, len(response))
    ends: dict[str | None, int] = dict.fromkeys(functions, len(program.text.rstrip()))
    ends.update(_function_ends(program.text, functions))
    return {function: program.position_in_response(end) for function, end in ends.items()}


def _function_ends(program: str, functions: Collection[str | None]) -> dict[str, int]:
    """The ends of the last definitions of functions, found in the program's tokens. Nothing is compiled."""
    line_starts = [0, *accumulate(len(line) + 1 for line in program.split("\n"))]
    tokens: list[tokenize.TokenInfo] = []
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(StringIO(program).readline):
            if token.type == tokenize.ERRORTOKEN:  # no program has one; searching behind each would be quadratic
                break
            tokens.append(token)
    starts: dict[str, int] = {}
    for index, (word, name) in enumerate(pairwise(tokens), start=1):
        if word.type == tokenize.NAME and word.string == "def" and name.string in functions:
            starts[name.string] = index
    ends: dict[str, int] = {}
    for function, start in starts.items():
        last = _last_token(tokens[start:])
        row, column = last.start if last.type == tokenize.NEWLINE else last.end
        ends[function] = line_starts[row - 1] + column
    return ends


def _last_token(tokens: Sequence[tokenize.TokenInfo]) -> tokenize.TokenInfo:
    """The last token of a function's code, from its name on."""
    last = tokens[0]
    depth = 0
    has_block = False
    for token in tokens[1:]:
        if token.type == tokenize.INDENT:
            depth += 1
            has_block = True
        elif token.type == tokenize.DEDENT:
            depth -= 1
        if token.type in NON_CODE:
            if has_block and depth == 0:
                break
        elif not has_block and last.type == tokenize.NEWLINE:  # the next statement, after a body on the same line
            break
        else:
            last = token
    return last


def rewards_of_tests(outcome: ProgramOutcome, reward: str) -> list[tuple[int | None, float]]:
    """Divides a program's reward among its tests.

    Without an error, every test gets its share. The reward of an error goes to the first test that ended in one, that
    of a compile error to the whole program.

    Args:
        outcome: outcome of the tests.
        reward: "paper" or "ratio".

    Returns:
        Number of the test, None for the whole program, and its part of the reward.
    """
    if reward != "ratio":
        if outcome.status == "compile_error":
            return [(None, paper_reward(outcome))]
        for number, status in enumerate(outcome.tests):
            if status in ("runtime_error", "timeout"):
                return [(number, paper_reward(outcome))]
    rewards: list[tuple[int | None, float]] = []
    for number, status in enumerate(outcome.tests):
        is_passed = status == "passed"
        test_reward = float(is_passed) if reward == "ratio" else 1.3 * is_passed - 0.3
        rewards.append((number, test_reward / outcome.total))
    return rewards


def rewards_by_segment(
    tests: Sequence[tuple[int | None, float]],
    functions: Sequence[str | None],
    segments: Sequence[str],
    which: ProgramBlock = "last",
    prompt: str = "",
) -> list[float]:
    """The reward of each macro action: a test's reward goes to the one in which the function that it calls ends.

    Args:
        tests: from `rewards_of_tests`.
        functions: the function that each test calls; None for a program that reads standard input.
        segments: texts of the macro actions, which form the response.
        which: see `dschat.programs.blocks.find_program`.
        prompt: see there.
    """
    response = "".join(segments)
    segment_ends = list(accumulate(map(len, segments)))
    rewards = [0.0] * len(segments)
    ends = ends_of(response, {None, *functions}, which, prompt)
    for number, reward in tests:
        end = ends[None if number is None else functions[number]]
        rewards[min(bisect_left(segment_ends, end), len(segments) - 1)] += reward
    return rewards


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
        programs: list[str | None] = []
        for response, prompt in zip(texts.last_replies, texts.prompts, strict=True):
            programs.append(program_of(response, self._which, prompt))
        tests = [tests_of(row) for row in texts.rows]
        outcomes = self._pool.run(programs, tests, [row.origin for row in texts.rows])
        seconds = time.monotonic() - start

        missing = torch.tensor([outcome.status == "invalid" for outcome in outcomes])
        self._report_invalid(outcomes)
        reward = REWARDS[self._reward]
        values = torch.tensor([0.0 if outcome.status == "invalid" else reward(outcome) for outcome in outcomes])
        values[missing] = values[~missing].mean()  # so that the mean of the rollout does not change

        device = rollout.input_ids.device
        segment_rewards: torch.Tensor | None = None
        if texts.segments is not None:
            numbers = []
            for row, outcome in enumerate(outcomes):
                numbers.append(self._segment_rewards(outcome, texts, row))
            # These numbers are rewards even if other sources score prefixes.
            _, segment_rewards = replace(texts.segments, of_prefixes=False).rewards(numbers)
            segment_rewards = segment_rewards.to(device)
        return Scores(
            values.to(device),
            missing.to(device) if missing.any() else None,
            _measured(outcomes[: texts.counted], seconds),
            segments=segment_rewards,
        )

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

    def _segment_rewards(self, outcome: ProgramOutcome, texts: ResponseTexts, row: int) -> list[float]:
        """The rewards of a response's macro actions."""
        assert texts.segments is not None
        segments = texts.segments.texts[row]
        if outcome.status == "invalid":
            return [0.0] * len(segments)
        data_row = texts.rows[row]
        functions = [case.function for case in self._pool.cases(tests_of(data_row), data_row.origin)]
        test_rewards = rewards_of_tests(outcome, self._reward)
        return rewards_by_segment(test_rewards, functions, segments, self._which, texts.prompts[row])


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
    return shares | {"programs/tests_per_second": (tests, seconds), "programs/seconds": (seconds, 1.0)}


def has_tests(row: Row) -> bool:
    """Whether a row has a test. Raises UserError if its column of tests has another form."""
    return bool(parse_problem(tests_of(row), row.origin, most=1).cases)


def run_solutions(rows: Sequence[Row], pool: ProgramPool, which: ProgramBlock = "last") -> dict[int, ProgramOutcome]:
    """Runs the first reference solution of each row that has one.

    The program may be in a fenced block, as in a response.

    Args:
        rows: rows of the data.
        pool: runs programs.
        which: see `dschat.programs.blocks.find_program`.

    Returns:
        Outcomes by number of the row.
    """
    solved = {}
    for number, row in enumerate(rows):
        if row.chosen is not None:
            solved[number] = row
    programs = [program_of(row.chosen or "", which) for row in solved.values()]
    tests = [tests_of(row) for row in solved.values()]
    outcomes = pool.run(programs, tests, [row.origin for row in solved.values()])
    return dict(zip(solved, outcomes, strict=True))
