# SPDX-License-Identifier: Apache-2.0
"""Win rates, position, length and agreement, from files of verdicts and of scored responses: table, JSON, plot."""

import argparse
import sys
from pathlib import Path

from dschat.common.script import both_spellings, run_script


def run() -> str:
    """Parses the flags and writes the report; returns its tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="verdicts of judges and people, and responses with rewards (of both models), in any mixture",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for report.json and report.png"
    )
    parser.add_argument(
        *both_spellings("--reward-margin"),
        type=float,
        default=0.0,
        help="rewards that differ by no more are a tie (%(default)s)",
    )
    args = parser.parse_args()
    from dschat.evaluation.report.build import build_evaluation_report

    tables = build_evaluation_report(args.files, args.output, args.reward_margin).text()
    return f"{tables}\nreport: {args.output / 'report.json'}, {args.output / 'report.png'}"


if __name__ == "__main__":
    sys.exit(run_script(run, print))
