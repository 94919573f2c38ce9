# SPDX-License-Identifier: Apache-2.0
"""Programs and their tests → what became of them. The sandbox returns data; what is right is decided here."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

from dschat.base.fingerprints import content_hash
from dschat.scoring.programs.levels import strongest_level, try_out
from dschat.scoring.programs.problem import Case, Problem, is_right, parse_problem
from dschat.scoring.programs.sandbox import Execution, Level, SandboxJob, SandboxLimits, execute

logger = logging.getLogger(__name__)

DEFAULT = SandboxLimits()
ATTEMPTS = 3  # to start a sandbox
KEPT = 100_000  # outcomes of programs seen before
Status = Literal["passed", "wrong", "runtime_error", "timeout", "compile_error", "invalid"]
# From what counts most: a program is the first of these that one of its tests is. The sandbox could not be started for
# an `invalid` one, which says nothing about it.
STATUSES: tuple[Status, ...] = ("invalid", "compile_error", "runtime_error", "timeout", "wrong", "passed")


@dataclass(frozen=True)
class ProgramOutcome:
    """What became of a program and of its tests."""

    tests: tuple[Status, ...]  # of those that were run, in order
    total: int  # tests that there were to run
    level: str  # of the sandbox
    seconds: float
    message: str = ""  # of the first test that was not passed: the text of its exception, which the program may forge

    @property
    def passed(self) -> int:
        """Tests passed."""
        return sum(test == "passed" for test in self.tests)

    @property
    def status(self) -> Status:
        """Passed if every test was."""
        for status in STATUSES[:-1]:
            if status in self.tests:
                return status
        return "passed" if self.total and self.passed == self.total else "invalid"


def paper_reward(outcome: ProgramOutcome) -> float:
    """The published reward: −1 for a compile error, −0.6 for another error or a time-out, else from −0.3 to 1.

    Source: MA-RLHF, appendix B.5; the outcome is not `invalid`.
    """
    if outcome.status == "compile_error":
        return -1.0
    if outcome.status in ("runtime_error", "timeout"):
        return -0.6
    return -0.3 + 1.3 * outcome.passed / outcome.total


def ratio_reward(outcome: ProgramOutcome) -> float:
    """Share of the tests passed; one that ended in an error is not passed."""
    return outcome.passed / outcome.total


def run_tests(
    program: str, tests: Mapping[str, object] | str, limits: SandboxLimits = DEFAULT, level: Level = "namespaces"
) -> ProgramOutcome:
    """Runs a program on every test, up to the first that ends in an error.

    Args:
        tests: as APPS's column `input_output`: inputs, outputs, and fn_name where a function is to be called.
        limits: what it may use.
        level: the walls around it, which must be there: see `dschat.scoring.programs.levels`.

    Returns:
        The outcome; `invalid` without tests.

    Raises:
        UserError: the tests are of another form.
    """
    return run_problem(program, parse_problem(tests, "tests"), limits, level)


def run_problem(
    program: str | None, problem: Problem, limits: SandboxLimits, level: Level, to_the_end: bool = False
) -> ProgramOutcome:
    """Runs a program on the tests of a problem.

    Args:
        program: None for a response without one, which counts as a compile error.
        to_the_end: go on after an error; the tests after a compile error are not run.
    """
    if program is None and problem.cases:
        return ProgramOutcome(("compile_error",), len(problem.cases), level, 0.0, "the response has no program")
    begun, ran, found, message = time.monotonic(), 0.0, list[Status](), ""
    for case in problem.cases:
        if ran > limits.program_seconds:
            status: Status = "timeout"
            text = f"all tests together took more than {limits.program_seconds:g} s"
        else:
            status, text, seconds = _run_case(program or "", case, limits, level)
            ran += seconds
        found.append(status)
        if status != "passed":
            message = message or text
        if status in ("compile_error", "invalid") or (status in ("runtime_error", "timeout") and not to_the_end):
            break
    return ProgramOutcome(tuple(found), len(problem.cases), level, time.monotonic() - begun, message)


def _run_case(program: str, case: Case, limits: SandboxLimits, level: Level) -> tuple[Status, str, float]:
    """What became of one test, why, and the program's seconds."""
    job = SandboxJob(program, case.text, case.function, case.arguments)
    for _ in range(ATTEMPTS):
        try:
            execution = execute(job, limits, level)
        except OSError as error:
            reason = str(error)
            continue
        if execution.started:
            return *_judge(execution, case, limits), execution.ran
        reason = execution.message or "the sandbox did not come up"
    return "invalid", reason, 0.0


def _judge(execution: Execution, case: Case, limits: SandboxLimits) -> tuple[Status, str]:
    # The kernel kills a program that has used up its processor time.
    killed = execution.status == 128 + signal.SIGKILL and execution.ran >= 0.9 * limits.seconds
    if execution.end == "time" or killed:
        return "timeout", f"more than {limits.seconds:g} s"
    if not execution.compiled:
        return "compile_error", execution.message
    if execution.end == "output":
        return "runtime_error", f"more than {limits.output_bytes:,} bytes of output"
    if execution.status != 0:
        return "runtime_error", execution.message or f"exit status {execution.status}"
    return ("passed", "") if is_right(case, execution.output) else ("wrong", "")


class ProgramPool:
    """Runs programs on tests. Equal programs with equal tests are run once, but for `invalid` ones and time-outs."""

    def __init__(
        self,
        least: Level = "namespaces",
        workers: int = 4,
        limits: SandboxLimits | None = None,
        max_tests: int | None = None,
        to_the_end: bool = False,
    ) -> None:
        """Looks which walls stand.

        Args:
            least: minimum isolation level.
            workers: programs at a time.
            max_tests: only so many tests of a problem, the first.
            to_the_end: run the tests after one that ended in an error, too.

        Raises:
            UserError: only weaker walls stand on this machine.
        """
        self.level, self.limits = strongest_level(least), limits or SandboxLimits()
        self._max_tests, self._to_the_end = max_tests, to_the_end
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._known: dict[str, Future[ProgramOutcome]] = {}
        reached = " and ".join(try_out(self.level)[1])
        logger.info("programs run at sandbox level %s, %d at a time", self.level, workers)
        if reached:
            logger.warning("at sandbox level %s a program reaches %s", self.level, reached)

    def run(
        self, programs: Sequence[str | None], tests: Sequence[str], origins: Sequence[str]
    ) -> list[ProgramOutcome]:
        """Outcomes of programs, in their order.

        Args:
            programs: None for a response without one.
            tests: the column `input_output` of each one's row, a JSON text.
            origins: of the rows, for messages.

        Raises:
            UserError: a row's tests are of another form.
        """
        futures: list[Future[ProgramOutcome]] = []
        try:
            for each in zip(programs, tests, origins, strict=True):
                futures.append(self._submit(*each))
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:  # else the process would do all of them before it ends
                future.cancel()
            raise

    def cases(self, tests: str, origin: str) -> tuple[Case, ...]:
        """The tests of a row that are run. Raises UserError where they are of another form."""
        return parse_problem(tests, origin, self._max_tests).cases

    def _submit(self, program: str | None, tests: str, origin: str) -> Future[ProgramOutcome]:
        how = [program, tests, asdict(self.limits), self.level, self._max_tests, self._to_the_end]
        key = content_hash(json.dumps(how))
        known = self._known.get(key)
        if known is None or (known.done() and _says_little(known)):
            if len(self._known) >= KEPT:
                self._known.clear()
            problem = parse_problem(tests, origin, self._max_tests)
            known = self._threads.submit(run_problem, program, problem, self.limits, self.level, self._to_the_end)
            self._known[key] = known
        return known


def _says_little(run: Future[ProgramOutcome]) -> bool:
    """Whether a run that has ended may end otherwise another time."""
    return run.cancelled() or run.exception() is not None or run.result().status in ("invalid", "timeout")
