# SPDX-License-Identifier: Apache-2.0
"""Runs programs on tests. The sandbox returns data; whether they are right is decided here."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from dschat.programs.levels import probe, strongest_level
from dschat.programs.problem import Case, Problem, is_right, parse_problem
from dschat.programs.sandbox import Execution, Level, SandboxJob, SandboxLimits, execute

logger = logging.getLogger(__name__)

DEFAULT = SandboxLimits()
ATTEMPTS = 3  # to start a sandbox
Status = Literal["passed", "wrong", "runtime_error", "timeout", "compile_error", "invalid"]
# In order of precedence: a program has the first status that one of its tests has. A test is `invalid` if the sandbox
# could not be started, which says nothing about the program.
STATUSES: tuple[Status, ...] = ("invalid", "compile_error", "runtime_error", "timeout", "wrong", "passed")


@dataclass(frozen=True)
class ProgramOutcome:
    """The outcome of a program's tests."""

    tests: tuple[Status, ...]  # of the tests that were run, in order
    total: int  # number of tests, run or not
    level: str  # of the sandbox
    seconds: float
    message: str = ""  # why a test failed, the first that is known: an exception's text, which the program may forge

    @property
    def passed(self) -> int:
        """The number of tests that passed."""
        return self.tests.count("passed")

    @property
    def status(self) -> Status:
        """The status with the highest precedence; passed only if every test passed."""
        for status in STATUSES[:-1]:
            if status in self.tests:
                return status
        return "passed" if self.total and self.passed == self.total else "invalid"


def paper_reward(outcome: ProgramOutcome) -> float:
    """The published reward: −1 for a compile error, −0.6 for another error or a time-out, otherwise from −0.3 to 1.

    The outcome must not be `invalid`. Source: MA-RLHF, appendix B.5.
    """
    if outcome.status == "compile_error":
        return -1.0
    if outcome.status in ("runtime_error", "timeout"):
        return -0.6
    return -0.3 + 1.3 * outcome.passed / outcome.total


def ratio_reward(outcome: ProgramOutcome) -> float:
    """The share of the tests that passed."""
    return outcome.passed / outcome.total


def run_tests(
    program: str, tests: Mapping[str, object] | str, limits: SandboxLimits = DEFAULT, level: Level = "namespaces"
) -> ProgramOutcome:
    """Runs a program on its tests, until the first that ends in an error.

    Args:
        program: Python source.
        tests: as in APPS's column `input_output`: inputs, outputs, and fn_name if a function is to be called.
        limits: resource limits.
        level: sandbox level, which must work on this machine, see `dschat.programs.levels`.

    Returns:
        The outcome; `invalid` without tests.

    Raises:
        UserError: the tests have another form.
    """
    return run_problem(program, parse_problem(tests, "tests"), limits, level)


def run_problem(
    program: str | None, problem: Problem, limits: SandboxLimits, level: Level, to_the_end: bool = False
) -> ProgramOutcome:
    """Runs a program on the tests of a problem.

    Args:
        program: None for a response without a program, which counts as a compile error.
        problem: the tests.
        limits: resource limits.
        level: sandbox level.
        to_the_end: continue after an error; tests after a compile error are never run.
    """
    if program is None and problem.cases:
        return ProgramOutcome(("compile_error",), len(problem.cases), level, 0.0, "the response has no program")
    start = time.monotonic()
    seconds = 0.0  # in the sandbox
    statuses: list[Status] = []
    message = ""
    for case in problem.cases:
        if seconds > limits.program_seconds:
            status: Status = "timeout"
            case_message = f"all tests together took more than {limits.program_seconds:g} s"
        else:
            status, case_message, case_seconds = _run_case(program or "", case, limits, level)
            seconds += case_seconds
        statuses.append(status)
        if status != "passed" and not message:
            message = case_message
        is_error = status in ("runtime_error", "timeout")
        if status in ("compile_error", "invalid") or (is_error and not to_the_end):
            break
    return ProgramOutcome(tuple(statuses), len(problem.cases), level, time.monotonic() - start, message)


def _run_case(program: str, case: Case, limits: SandboxLimits, level: Level) -> tuple[Status, str, float]:
    """Status and message of one test, and the seconds that the program ran."""
    job = SandboxJob(program, case.text, case.function, case.arguments)
    for _ in range(ATTEMPTS):
        try:
            execution = execute(job, limits, level)
        except OSError as error:
            reason = str(error)
            continue
        if execution.started:
            status, message = _status_of(execution, case, limits)
            return status, message, execution.seconds_since_setup
        reason = execution.message or "the sandbox did not start"
    return "invalid", reason, 0.0


def _status_of(execution: Execution, case: Case, limits: SandboxLimits) -> tuple[Status, str]:
    # The kernel kills a program that exceeds its processor time; this process kills one for its time or its output.
    was_killed = execution.status == 128 + signal.SIGKILL and execution.seconds_since_setup >= 0.9 * limits.seconds
    if execution.end == "time" or (execution.end == "exit" and was_killed):
        return "timeout", f"more than {limits.seconds:g} s"
    if not execution.compiled:
        return "compile_error", execution.message
    if execution.end == "output":
        return "runtime_error", f"more than {limits.output_bytes:,} bytes of output"
    if execution.status != 0:
        return "runtime_error", execution.message or f"exit status {execution.status}"
    return ("passed", "") if is_right(case, execution.output) else ("wrong", "")


class ProgramPool:
    """Runs programs on tests in threads.

    A program is run even if an equal one has been: a kept outcome would make the luck of a random program permanent.
    """

    def __init__(
        self,
        least: Level = "namespaces",
        workers: int = 4,
        limits: SandboxLimits | None = None,
        max_tests: int | None = None,
        to_the_end: bool = False,
    ) -> None:
        """Selects the strongest sandbox level of this machine.

        Args:
            least: minimum level.
            workers: number of programs that run at the same time.
            limits: resource limits.
            max_tests: maximum number of tests of a problem; the first ones are taken.
            to_the_end: continue with the tests after an error.

        Raises:
            UserError: only weaker levels work on this machine.
        """
        self.level = strongest_level(least)
        self.limits = limits or SandboxLimits()
        self._max_tests = max_tests
        self._to_the_end = to_the_end
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        logger.info("programs run at sandbox level %s, %d at a time", self.level, workers)
        holes = probe(self.level).holes
        if holes:
            logger.warning("at sandbox level %s a program reaches %s", self.level, " and ".join(holes))

    def run(
        self, programs: Sequence[str | None], tests: Sequence[str], origins: Sequence[str]
    ) -> list[ProgramOutcome]:
        """Runs programs, and returns their outcomes in the same order.

        Args:
            programs: None for a response without a program.
            tests: column `input_output` of each program's row, a JSON text.
            origins: origins of the rows, for messages.

        Raises:
            UserError: a row's tests have another form.
        """
        futures: list[Future[ProgramOutcome]] = []
        try:
            for program, program_tests, origin in zip(programs, tests, origins, strict=True):
                problem = parse_problem(program_tests, origin, self._max_tests)
                futures.append(
                    self._threads.submit(run_problem, program, problem, self.limits, self.level, self._to_the_end)
                )
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:  # otherwise the process would run all of them before it ends
                future.cancel()
            raise

    def cases(self, tests: str, origin: str) -> tuple[Case, ...]:
        """The tests of a row that are run. Raises UserError if they have another form."""
        return parse_problem(tests, origin, self._max_tests).cases
