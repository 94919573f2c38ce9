# SPDX-License-Identifier: Apache-2.0
"""A program and its tests → what became of it. The sandbox returns data; what is right is decided here."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

from dschat.scoring.programs.answers import is_right
from dschat.scoring.programs.limits import Limits
from dschat.scoring.programs.outcome import Outcome, Status
from dschat.scoring.programs.problem import Case, Problem, parse_problem
from dschat.scoring.programs.sandbox import Execution, Job, Level, execute

DEFAULT = Limits()
ATTEMPTS = 3  # to start a sandbox


def run_tests(
    program: str, tests: Mapping[str, object] | str, limits: Limits = DEFAULT, level: Level = "namespaces"
) -> Outcome:
    """Runs a program on every test, up to the first that ends in an error.

    Args:
        program: Python source.
        tests: as APPS's column `input_output`: inputs, outputs, and fn_name where a function is to be called.
        limits: what it may use.
        level: the walls around it, which must be there: see `dschat.scoring.programs.levels`.

    Returns:
        The outcome; `invalid` without tests.

    Raises:
        UserError: the tests are of another form.
    """
    return run_problem(program, parse_problem(tests, "tests"), limits, level)


def run_problem(program: str, problem: Problem, limits: Limits, level: Level, to_the_end: bool = False) -> Outcome:
    """Runs a program on the tests of a problem.

    Args:
        program: Python source.
        problem: its tests.
        limits: what it may use.
        level: the walls around it.
        to_the_end: go on after an error; the tests after a compile error are not run.
    """
    begun, ran, found, message = time.monotonic(), 0.0, list[Status](), ""
    for case in problem.cases:
        if ran > limits.program_seconds:
            status: Status = "timeout"
            text = f"all tests together took more than {limits.program_seconds:g} s"
        else:
            status, text, seconds = _run_case(program, case, problem.function, limits, level)
            ran += seconds
        found.append(status)
        if status != "passed":
            message = message or text
        if status in ("compile_error", "invalid") or (status in ("runtime_error", "timeout") and not to_the_end):
            break
    return Outcome(tuple(found), len(problem.cases), level, time.monotonic() - begun, message)


def _run_case(
    program: str, case: Case, function: str | None, limits: Limits, level: Level
) -> tuple[Status, str, float]:
    """What became of one test, why, and the program's seconds."""
    job = Job(program, case.text, function, case.arguments)
    for _ in range(ATTEMPTS):
        try:
            execution = execute(job, limits, level)
        except OSError as error:
            reason = str(error)
            continue
        if execution.started:
            return *_judge(execution, case, function, limits), execution.ran
        reason = execution.message or "the sandbox did not come up"
    return "invalid", reason, 0.0


def _judge(execution: Execution, case: Case, function: str | None, limits: Limits) -> tuple[Status, str]:
    if execution.end == "time" or _used_its_time(execution, limits):
        return "timeout", f"more than {limits.seconds:g} s"
    if not execution.compiled:
        return "compile_error", execution.message
    if execution.end == "output":
        return "runtime_error", f"more than {limits.output_bytes:,} bytes of output"
    if execution.status != 0:
        return "runtime_error", execution.message or f"exit status {execution.status}"
    return ("passed", "") if is_right(case, execution.output, function is not None) else ("wrong", "")


def _used_its_time(execution: Execution, limits: Limits) -> bool:
    """Whether the kernel ended it for its processor time."""
    return execution.status == 128 + signal.SIGKILL and execution.ran >= 0.9 * limits.seconds
