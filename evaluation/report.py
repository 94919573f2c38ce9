# SPDX-License-Identifier: Apache-2.0
"""Win rates, position, length and agreement, from files of verdicts and of scored responses: table, JSON, plot."""

import argparse
import sys
from pathlib import Path

from dschat.common.script import run_script
from dschat.data.formats.registry import compared_set


def run() -> str:
    """Writes the report; returns its tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    files = "verdicts of judges and people, and responses with rewards (of both models), in any mixture"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=files)
    parser.add_argument("--output", type=Path, required=True, help="folder for report.json and report.png")
    margin = "rewards that differ by no more are a tie (%(default)s)"
    parser.add_argument("--reward-margin", "--reward_margin", type=float, default=0.0, help=margin)
    dataset = "summarize, hh-rlhf or webgpt: data set of the files that name none"
    parser.add_argument("--dataset", default="", help=dataset)
    flags = parser.parse_args()
    dataset = compared_set(flags.dataset) if flags.dataset else ""
    from dschat.evaluation.report.build import build_evaluation_report

    tables = build_evaluation_report(flags.files, flags.output, flags.reward_margin, dataset).text()
    return f"{tables}\nreport: {flags.output / 'report.json'}, {flags.output / 'report.png'}"


if __name__ == "__main__":
    sys.exit(run_script(run, print))
