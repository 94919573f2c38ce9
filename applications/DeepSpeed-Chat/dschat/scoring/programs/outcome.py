# SPDX-License-Identifier: Apache-2.0
"""What became of a program."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "wrong", "runtime_error", "timeout", "compile_error", "invalid"]
# From what counts most: a program is the first of these that one of its tests is. The sandbox could not be started for
# an `invalid` one, which says nothing about it.
STATUSES: tuple[Status, ...] = ("invalid", "compile_error", "runtime_error", "timeout", "wrong", "passed")


@dataclass(frozen=True)
class Outcome:
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


def paper_reward(outcome: Outcome) -> float:
    """The published reward: −1 for a compile error, −0.6 for another error or a time-out, else from −0.3 to 1.

    Source: MA-RLHF, appendix B.5; the outcome is not `invalid`.
    """
    if outcome.status == "compile_error":
        return -1.0
    if outcome.status in ("runtime_error", "timeout"):
        return -0.6
    return -0.3 + 1.3 * outcome.passed / outcome.total


def ratio_reward(outcome: Outcome) -> float:
    """Share of the tests passed; one that ended in an error is not passed."""
    return outcome.passed / outcome.total
