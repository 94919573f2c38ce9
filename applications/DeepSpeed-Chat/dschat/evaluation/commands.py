# SPDX-License-Identifier: Apache-2.0
"""What the commands that compare models do: draw rows, let people vote, report."""

import getpass
import sys
import threading

from dschat.common.jsonl import iterate_rows
from dschat.data.hub import compared_set
from dschat.errors import UserError
from dschat.evaluation.best_of import holds_sweep
from dschat.evaluation.human import Study, TerminalRating, VoteFile
from dschat.evaluation.options import PassOptions, ReportOptions, SampleOptions, VoteOptions
from dschat.evaluation.pairs import model_names, read_pairs, sample_file
from dschat.evaluation.programs import holds_programs, pass_rates, pass_table
from dschat.evaluation.turns import holds_turns


def sample(options: SampleOptions) -> str:
    """Draws; returns what was drawn."""
    dataset = compared_set(options.dataset, own=True)
    return sample_file(options.data_path, options.save_path, dataset, options.num, options.seed)


def vote(options: VoteOptions) -> str:
    """Asks a person; returns what is left to say."""
    pairs = read_pairs(options.model_name_a, "--model_name_a", options.model_name_b, "--model_name_b")
    first, second = model_names([options.model_name_a, options.model_name_b])
    dataset = compared_set(options.dataset, own=True) if options.dataset else ""
    study = Study(pairs, VoteFile(options.output), (first, second), dataset, options.seed)
    if options.web:
        return _vote_in_browser(study, options.rater or "", options.port)
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    rater = _login_name() if options.rater is None else options.rater
    TerminalRating(study.session(rater), input, print).run()
    return ""


def pass_at_k(options: PassOptions) -> str:
    """The table."""
    return pass_table(pass_rates(options.files, options.k))


def report(options: ReportOptions) -> str:
    """Writes the report of whatever the files hold; returns its tables."""
    from dschat.evaluation.report.build import best_of_report, build_evaluation_report, turns_report, write_pass_report

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


def _login_name() -> str:
    """Who is logged in; "rater" where nobody knows."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "rater"


def _vote_in_browser(study: Study, rater: str, port: int | None) -> str:
    """Serves the page until Ctrl-C; returns how far everybody is."""
    from dschat.evaluation.human_page import serve

    page, address = serve(study, rater, port)
    print(f"Open {address} in a browser on this machine. Ctrl-C ends; votes are in {study.votes.path}", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    page.close(verbose=False)
    return "\n".join(study.session(name).summary() for name in study.raters())
