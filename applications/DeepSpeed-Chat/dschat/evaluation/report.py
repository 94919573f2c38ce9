# SPDX-License-Identifier: Apache-2.0
"""`dschat report`: the report that fits what the files hold."""

from pathlib import Path
from pkgutil import resolve_name

from dschat.base.errors import UserError
from dschat.base.jsonl import iterate_rows
from dschat.data.compared_sets import compared_set
from dschat.evaluation.benchmarks import benchmarks_report
from dschat.evaluation.best_of import best_of_report
from dschat.evaluation.comparisons import build_evaluation_report
from dschat.evaluation.options import ReportOptions
from dschat.evaluation.responses import FILE_FLAG
from dschat.evaluation.run_data import METRICS
from dschat.evaluation.runs import runs_report

# Reports of other folders, imported when there is a file of theirs.
PROGRAM_REPORT = "dschat.programs.pass_at_k:write_pass_report"
TURN_REPORT = "dschat.judge.turn_report:turns_report"
# Columns that tell programs that were run, sweeps, verdicts by turn, and benchmarks from other files.
PROGRAM_COLUMNS = {"samples"}
SWEEP_COLUMNS = {"temperature", "responses", "rewards"}
TURN_COLUMNS = {"verdict", "number", "turn"}
BENCHMARK_COLUMNS = {"task", "metric", "value"}


def report(options: ReportOptions) -> str:
    """Write the report of the files; returns its tables and the paths of what was written."""
    files = options.files
    output = options.output
    kinds = {"runs" if _is_run(file) else _kind_of(file) for file in files}
    if len(kinds) > 1:
        names = "Runs, files of programs, of sweeps, of verdicts by turn, of benchmarks, and of verdicts or rewards"
        raise UserError(f"{names}: give each kind in a report of its own.")
    if kinds == {"runs"}:
        return f"{runs_report(files, output)}\nreport: {output / 'report.html'}, {output / 'report.json'}"

    if kinds == {"programs"}:
        return f"{resolve_name(PROGRAM_REPORT)(files, output, options.dataset)}\nreport: {output / 'report.json'}"
    if kinds == {"benchmarks"}:
        return f"{benchmarks_report(files, output)}\nreport: {output / 'report.json'}"
    if kinds == {"sweep"}:
        tables = best_of_report(files, options.best_of, output)
    elif kinds == {"turns"}:
        tables = resolve_name(TURN_REPORT)(files, output)
    else:
        dataset = compared_set(options.dataset, own=True) if options.dataset else ""
        tables = build_evaluation_report(files, output, options.reward_margin, dataset).text()
    return f"{tables}\nreport: {output / 'report.json'}, {output / 'report.png'}"


def _is_run(path: Path) -> bool:
    return path.is_dir() or path.name == METRICS


def _kind_of(file: Path) -> str:
    _, first_row = next(iterate_rows(file, FILE_FLAG))
    columns = set(first_row)
    if columns >= PROGRAM_COLUMNS:
        return "programs"
    if columns >= SWEEP_COLUMNS:
        return "sweep"
    if columns >= TURN_COLUMNS:
        return "turns"
    if columns >= BENCHMARK_COLUMNS:
        return "benchmarks"
    return "verdicts or rewards"
