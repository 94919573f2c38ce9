# SPDX-License-Identifier: Apache-2.0
"""Scores of programs that a model wrote: run in a sandbox, on tests."""

from dschat.scoring.programs.run import ProgramOutcome, run_tests
from dschat.scoring.programs.sandbox import SandboxLimits

__all__ = ["ProgramOutcome", "SandboxLimits", "run_tests"]
