# SPDX-License-Identifier: Apache-2.0
"""Scores programs that a model wrote by running them on tests in a sandbox."""

from dschat.programs.run import ProgramOutcome, run_tests
from dschat.programs.sandbox import SandboxLimits

__all__ = ["ProgramOutcome", "SandboxLimits", "run_tests"]
