# SPDX-License-Identifier: Apache-2.0
"""The commands `dschat report` and `dschat pass-at-k`."""

from dschat.common.jsonl import iterate_rows
from dschat.data.hub import compared_set
from dschat.errors import UserError
from dschat.evaluation.best_of import holds_sweep
from dschat.evaluation.options import PassOptions, ReportOptions
from dschat.evaluation.programs import holds_programs, pass_rates
from dschat.evaluation.turns import holds_turns
from dschat.reports.comparisons import build_evaluation_report
from dschat.reports.evaluations import best_of_report, pass_table, turns_report, write_pass_report


def pass_at_k(options: PassOptions) -> str:
    """The table."""
    return pass_table(pass_rates(options.files, options.k))


def report(options: ReportOptions) -> str:
    """Writes the report of whatever the files hold; returns its tables."""
    files, output = options.files, options.output
    rows = [next(iterate_rows(file, "FILE"))[1] for file in files]  # the first ones tell what the files hold
    programs, sweeps, turns = (list(map(holds, rows)) for holds in (holds_programs, holds_sweep, holds_turns))
    if all(programs):
        return f"{write_pass_report(files, output, options.dataset)}\nreport: {output / 'report.json'}"
    if all(sweeps):
        tables = best_of_report(files, options.best_of, output)
    elif all(turns):
        tables = turns_report(files, output, options.dataset)
    elif any(programs + sweeps + turns):
        kinds = "Files of programs, of sweeps, of verdicts by turn, and of verdicts or rewards"
        raise UserError(f"{kinds}: give each kind in a report of its own.")
    else:
        dataset = compared_set(options.dataset, own=True) if options.dataset else ""
        tables = build_evaluation_report(files, output, options.reward_margin, dataset).text()
    return f"{tables}\nreport: {output / 'report.json'}, {output / 'report.png'}"
