# SPDX-License-Identifier: Apache-2.0
"""`dschat data check --run_solutions`: the check of data, with reference solutions run on their tests."""

import os

from dschat.base.extras import require_extra
from dschat.data import command
from dschat.data.options import CheckOptions
from dschat.data.preview import Settings
from dschat.data.sources import load_source


def run(options: CheckOptions) -> str:
    """Checks each source."""
    if options.check.run_solutions:
        require_extra("programs", "--run_solutions")
    return command.check(options, describe_solutions)


def describe_solutions(path: str, options: CheckOptions, settings: Settings) -> str:
    """Lines about how many reference solutions of a source's first rows pass their tests."""
    from dschat.programs.run import ProgramPool
    from dschat.programs.scores import solutions_report

    source = load_source(path, settings.keys, settings.seed)
    rows = source.train + source.eval
    pool = ProgramPool(options.check.sandbox_level, workers=os.cpu_count() or 1)
    lines = solutions_report(rows[: options.check.run_solutions], pool)
    return "\n  ".join([f"\n\nreference solutions, sandbox level {pool.level}", *lines])
