# SPDX-License-Identifier: Apache-2.0
"""Scores of programs that a model wrote: run in a sandbox, on tests."""

from dschat.scoring.programs.limits import Limits
from dschat.scoring.programs.outcome import Outcome
from dschat.scoring.programs.run import run_tests

__all__ = ["Limits", "Outcome", "run_tests"]
