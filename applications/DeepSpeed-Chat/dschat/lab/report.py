# SPDX-License-Identifier: Apache-2.0
"""`dschat report`: the report that fits what the files hold."""

from pathlib import Path

from dschat.base.errors import UserError
from dschat.base.jsonl import iterate_rows
from dschat.data.hub import compared_set
from dschat.lab.best_of import best_of_report
from dschat.lab.comparisons import build_evaluation_report
from dschat.lab.options import ReportOptions
from dschat.lab.pass_at_k import write_pass_report
from dschat.lab.responses import FILE
from dschat.lab.run_data import METRICS
from dschat.lab.runs import runs_report
from dschat.lab.turn_report import turns_report

# Columns that tell programs that were run, sweeps, and verdicts by turn from other files.
PROGRAM_COLUMNS = {"samples"}
SWEEP_COLUMNS = {"temperature", "responses", "rewards"}
TURN_COLUMNS = {"verdict", "number", "turn"}


def report(options: ReportOptions) -> str:
    """Write the report of the files; returns its tables and the paths of what was written."""
    files = options.files
    output = options.output
    kinds = {"runs" if _is_run(file) else _kind_of(file) for file in files}
    if len(kinds) > 1:
        names = "Runs, files of programs, of sweeps, of verdicts by turn, and of verdicts or rewards"
        raise UserError(f"{names}: give each kind in a report of its own.")
    if kinds == {"runs"}:
        return f"{runs_report(files, output)}\nreport: {output / 'report.html'}, {output / 'report.json'}"

    if kinds == {"programs"}:
        return f"{write_pass_report(files, output, options.dataset)}\nreport: {output / 'report.json'}"
    if kinds == {"sweep"}:
        tables = best_of_report(files, options.best_of, output)
    elif kinds == {"turns"}:
        tables = turns_report(files, output, options.dataset)
    else:
        dataset = compared_set(options.dataset, own=True) if options.dataset else ""
        tables = build_evaluation_report(files, output, options.reward_margin, dataset).text()
    return f"{tables}\nreport: {output / 'report.json'}, {output / 'report.png'}"


def _is_run(path: Path) -> bool:
    return path.is_dir() or path.name == METRICS


def _kind_of(file: Path) -> str:
    _, first_row = next(iterate_rows(file, FILE))
    columns = set(first_row)
    if columns >= PROGRAM_COLUMNS:
        return "programs"
    if columns >= SWEEP_COLUMNS:
        return "sweep"
    if columns >= TURN_COLUMNS:
        return "turns"
    return "verdicts or rewards"
