# SPDX-License-Identifier: Apache-2.0
"""pass@k of files that inference_with_programs.py wrote, by difficulty, with 95 % intervals over problems."""

import argparse
import sys
from pathlib import Path

from dschat.common.script import run_script
from dschat.errors import UserError


def run() -> str:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one per model")
    parser.add_argument("-k", nargs="+", type=int, default=[1, 5], help="programs that are looked at (1 5)")
    flags = parser.parse_args()
    if min(flags.k) < 1:
        raise UserError(f"-k {min(flags.k)}: must be at least 1.")
    from dschat.evaluation.programs import pass_rates
    from dschat.reports.evaluations import pass_table

    return pass_table(pass_rates(flags.files, flags.k))


if __name__ == "__main__":
    sys.exit(run_script(run, print))
