# SPDX-License-Identifier: Apache-2.0
"""Scores of responses that are programs: what became of them on the tests of their rows."""

from __future__ import annotations

import logging
import time
import tokenize
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from itertools import accumulate, pairwise

import torch

from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.run.distributed import gather_objects
from dschat.scoring.programs.blocks import ProgramBlock, find_program, program_of
from dschat.scoring.programs.problem import parse_problem
from dschat.scoring.programs.run import STATUSES, ProgramOutcome, ProgramPool, paper_reward, ratio_reward
from dschat.scoring.source import Measured, ResponseTexts, Scores
from macro_actions.types import Rollout

logger = logging.getLogger(__name__)

COLUMN = "input_output"
SILENT = (tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER)


def end_of(response: str, function: str | None, which: ProgramBlock = "last", prompt: str = "") -> int:
    """Where the function of this name ends in a response's program; without one, where the program ends.

    Args:
        which: see `dschat.scoring.programs.blocks.find_program`, as for `prompt`.

    Returns:
        The number of characters of the response up to there; all of them where it has no program.
    """
    program = find_program(response, which, prompt)
    if program is None:
        return len(response)
    ends = [] if function is None else _ends_of(program.text, function)
    return program.position_in_response(ends[-1] if ends else len(program.text.rstrip()))


def _ends_of(program: str, function: str) -> list[int]:
    """Where the functions of this name end, as far as Python can tell words and blocks apart. Nothing is compiled."""
    lines = [0, *accumulate(len(line) + 1 for line in program.split("\n"))]
    tokens: list[tokenize.TokenInfo] = []
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(StringIO(program).readline):
            tokens.append(token)
    ends = []
    for place, (word, name) in enumerate(pairwise(tokens)):
        if (word.type, word.string, name.string) != (tokenize.NAME, "def", function):
            continue
        depth, last, has_body = 0, name, False
        for token in tokens[place + 2 :]:
            depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
            has_body = has_body or token.type == tokenize.INDENT
            if token.type in SILENT:
                if has_body and not depth:
                    break
            elif not has_body and last.type == tokenize.NEWLINE:  # the next statement, of a body in the same line
                break
            else:
                last = token
        (row, column) = last.start if last.type == tokenize.NEWLINE else last.end
        ends.append(lines[row - 1] + column)
    return ends


def rewards_of_tests(outcome: ProgramOutcome, reward: str) -> list[tuple[int | None, float]]:
    """Numbers of tests and what they are worth, which is together the program's reward; None is the whole program.

    Without an error, every test has its share of it. An error's is of the test that ended in it first; a compile
    error's is of the program.
    """
    total, passed = outcome.total, [status == "passed" for status in outcome.tests]
    if reward == "ratio":
        return [(number, is_passed / total) for number, is_passed in enumerate(passed)]
    if outcome.status == "compile_error":
        return [(None, paper_reward(outcome))]
    if outcome.status in ("runtime_error", "timeout"):
        first = next(n for n, status in enumerate(outcome.tests) if status in ("runtime_error", "timeout"))
        return [(first, paper_reward(outcome))]
    return [(number, (1.3 * is_passed - 0.3) / total) for number, is_passed in enumerate(passed)]


def rewards_by_segment(
    tests: Sequence[tuple[int | None, float]],
    functions: Sequence[str | None],
    segments: Sequence[str],
    which: ProgramBlock = "last",
    prompt: str = "",
) -> list[float]:
    """A reward of each macro action: what tests are worth stands where the function that they call ends.

    Args:
        tests: see `rewards_of_tests`.
        functions: which each test calls; None for a program that reads standard input.
        segments: texts of the macro actions, together the response.
        which: see `dschat.scoring.programs.blocks.find_program`, as for `prompt`.
    """
    ends, rewards, response = list(accumulate(map(len, segments))), [0.0] * len(segments), "".join(segments)
    for number, worth in tests:
        place = end_of(response, None if number is None else functions[number], which, prompt)
        rewards[min(bisect_left(ends, place), len(ends) - 1)] += worth
    return rewards


REWARDS: dict[str, Callable[[ProgramOutcome], float]] = {"paper": paper_reward, "ratio": ratio_reward}


class ProgramScores:
    """Runs the program in each response; a sandbox that cannot be started leaves its row without a score."""

    model: None = None  # no model, so that the self-check has nothing to compare

    def __init__(self, pool: ProgramPool, reward: str, skips: bool = False, which: ProgramBlock = "last") -> None:
        """Takes what runs programs.

        Args:
            reward: `paper` or `ratio`.
            skips: go on where a process could run none of its programs.
            which: see `dschat.scoring.programs.blocks.find_program`.
        """
        self._pool = pool
        self._reward = reward
        self._skips = skips
        self._which = which

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Scores:
        """One number for each response. Every rank must call it. Raises UserError, on all ranks alike."""
        begun = time.monotonic()
        rows = texts.rows
        programs = [
            program_of(response, self._which, prompt)
            for response, prompt in zip(texts.responses, texts.prompts, strict=True)
        ]
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
        reward, segments = REWARDS[self._reward], None
        values = torch.tensor([0.0 if outcome.status == "invalid" else reward(outcome) for outcome in outcomes])
        # The mean of the others leaves the mean of the rollout as it is.
        values[missing] = values[~missing].mean()
        if texts.segments is not None:
            numbers = [
                self._by_segment(*one) for one in zip(outcomes, rows, texts.segments.texts, texts.prompts, strict=True)
            ]
            segments = replace(texts.segments, of_prefixes=False).rewards(numbers)[1].to(device)
        left_out = missing.to(device) if missing.any() else None
        return Scores(values.to(device), left_out, _measured(outcomes, seconds), segments=segments)

    def _by_segment(self, outcome: ProgramOutcome, row: Row, segments: Sequence[str], prompt: str) -> list[float]:
        """The rewards of tests are those of macro actions, whatever other sources are asked for."""
        if outcome.status == "invalid":
            return [0.0] * len(segments)
        functions = [case.function for case in self._pool.cases(tests_of(row), row.origin)]
        tests = rewards_of_tests(outcome, self._reward)
        return rewards_by_segment(tests, functions, segments, self._which, prompt)


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


def run_solutions(rows: Sequence[Row], pool: ProgramPool, which: ProgramBlock = "last") -> dict[int, ProgramOutcome]:
    """Runs the first reference solution of each row that has one.

    A solution that is written as a response, with its program in a fenced block, is read as responses are.

    Args:
        which: see `dschat.scoring.programs.blocks.find_program`.

    Returns:
        Number of the row → outcome.
    """
    numbers = [number for number, row in enumerate(rows) if row.chosen is not None]
    chosen = [rows[number] for number in numbers]
    tests, origins = [tests_of(row) for row in chosen], [row.origin for row in chosen]
    programs = [program_of(row.chosen or "", which) for row in chosen]
    return dict(zip(numbers, pool.run(programs, tests, origins), strict=True))


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
