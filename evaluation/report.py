# SPDX-License-Identifier: Apache-2.0
"""Win rates, position, length and agreement, from files of verdicts and of scored responses: table, JSON, plot.

Files of programs that were run (inference_with_programs.py) give pass@1 and pass@5 instead; sweeps (best_of_n.py), one
per model, the rewards of the best of N; verdicts by turn (winrate_by_turn.py) the win rates: in tables and curves.
"""

import argparse
import sys
from pathlib import Path

from dschat.common.script import run_script
from dschat.data.hub import compared_set
from dschat.errors import UserError


def run() -> str:
    """Writes the report; returns its tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    files = "verdicts of judges and people, and responses with rewards (of both models), in any mixture; or programs; "
    files += "or sweeps; or verdicts by turn"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=files)
    parser.add_argument("--output", type=Path, required=True, help="folder for report.json and report.png")
    margin = "rewards that differ by no more are a tie (%(default)s)"
    parser.add_argument("--reward-margin", "--reward_margin", type=float, default=0.0, help=margin)
    dataset = "summarize, hh-rlhf, webgpt or your own name: data set of the files that name none; apps for programs "
    dataset += "and ultrainteract for verdicts by turn show the published figures as well"
    parser.add_argument("--dataset", default="", help=dataset)
    numbers = "of sweeps: numbers of responses to choose from (4 8 16 32 as far as so many were drawn, and all)"
    parser.add_argument("--best-of", "--best_of", type=int, nargs="+", help=numbers)
    flags = parser.parse_args()
    if flags.best_of is not None and min(flags.best_of) < 1:
        raise UserError(f"--best-of {min(flags.best_of)}: must be at least 1.")
    from dschat.common.jsonl import iterate_rows
    from dschat.evaluation.best_of import holds_sweep
    from dschat.evaluation.programs import holds_programs
    from dschat.evaluation.turns import holds_turns
    from dschat.reports.comparisons import build_evaluation_report
    from dschat.reports.evaluations import best_of_report, turns_report, write_pass_report

    rows = [next(iterate_rows(file, "FILE"))[1] for file in flags.files]  # the first ones tell what the files hold
    programs, sweeps, turns = (list(map(holds, rows)) for holds in (holds_programs, holds_sweep, holds_turns))
    if all(programs):
        return f"{write_pass_report(flags.files, flags.output, flags.dataset)}\nreport: {flags.output / 'report.json'}"
    if all(sweeps):
        tables = best_of_report(flags.files, flags.best_of, flags.output)
    elif all(turns):
        tables = turns_report(flags.files, flags.output, flags.dataset)
    elif any(programs + sweeps + turns):
        kinds = "Files of programs, of sweeps, of verdicts by turn, and of verdicts or rewards"
        raise UserError(f"{kinds}: give each kind in a report of its own.")
    else:
        dataset = compared_set(flags.dataset, own=True) if flags.dataset else ""
        tables = build_evaluation_report(flags.files, flags.output, flags.reward_margin, dataset).text()
    return f"{tables}\nreport: {flags.output / 'report.json'}, {flags.output / 'report.png'}"


if __name__ == "__main__":
    sys.exit(run_script(run, print))
