# SPDX-License-Identifier: Apache-2.0
"""What the commands that compare models do: draw rows, let people vote."""

import getpass
import sys
import threading

from dschat.data.hub import compared_set
from dschat.evaluation.human import Study, TerminalRating, VoteFile
from dschat.evaluation.options import SampleOptions, VoteOptions
from dschat.evaluation.pairs import model_names, read_pairs, sample_file


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
