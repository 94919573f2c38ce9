# SPDX-License-Identifier: Apache-2.0
"""Win rates, position, length and agreement, from files of verdicts and of scored responses: table, JSON, plot.

Files of programs that were run (inference_with_programs.py) give pass@1 and pass@5 instead.
"""

import argparse
import sys
from pathlib import Path

from dschat.common.script import run_script
from dschat.data.formats.registry import compared_set
from dschat.errors import UserError


def run() -> str:
    """Writes the report; returns its tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    files = "verdicts of judges and people, and responses with rewards (of both models), in any mixture; or programs"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=files)
    parser.add_argument("--output", type=Path, required=True, help="folder for report.json and report.png")
    margin = "rewards that differ by no more are a tie (%(default)s)"
    parser.add_argument("--reward-margin", "--reward_margin", type=float, default=0.0, help=margin)
    dataset = "summarize, hh-rlhf or webgpt: data set of the files that name none"
    parser.add_argument("--dataset", default="", help=dataset)
    flags = parser.parse_args()
    dataset = compared_set(flags.dataset) if flags.dataset else ""
    from dschat.evaluation.programs.pass_at_k import holds_programs
    from dschat.evaluation.programs.report import write_pass_report
    from dschat.evaluation.report.build import build_evaluation_report

    programs = [holds_programs(file) for file in flags.files]
    if all(programs):
        return f"{write_pass_report(flags.files, flags.output)}\nreport: {flags.output / 'report.json'}"
    if any(programs):
        raise UserError("Files of programs and files of verdicts or rewards: give each kind in a report of its own.")
    tables = build_evaluation_report(flags.files, flags.output, flags.reward_margin, dataset).text()
    return f"{tables}\nreport: {flags.output / 'report.json'}, {flags.output / 'report.png'}"


if __name__ == "__main__":
    sys.exit(run_script(run, print))
