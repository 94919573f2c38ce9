# SPDX-License-Identifier: Apache-2.0
"""People compare the responses of two models: in the terminal, or with --web in a browser.

Every vote is saved at once. The same command goes on where the rater stopped.
"""

import argparse
import getpass
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from dschat.common.script import add_flags, flag, run_script
from dschat.data.hub import compared_set
from dschat.evaluation.human import Study, TerminalRating, VoteFile
from dschat.evaluation.pairs import model_names, read_pairs


@dataclass
class Flags:
    """The command line."""

    model_name_a: Path = flag("responses of the first model (.jsonl)", also="model_a")
    model_name_b: Path = flag("responses of the second model (.jsonl)", also="model_b")
    output: Path = flag("file of the votes (.jsonl); votes in it are kept")
    dataset: str = flag("summarize, hh-rlhf or webgpt: its guidelines are shown; or your own name", "")
    rater: str | None = flag("name of the person who votes (default: the login name; --web asks)", None)
    seed: int = flag("of the shuffling of sides (default %(default)s)", 42)
    web: bool = flag("vote in a browser on this machine (needs the extra ui)", False)
    port: int | None = flag("of --web (default: the first free one from 7860)", None)


def run() -> str:
    """Asks; returns what is left to say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, Flags)
    flags = Flags(**vars(parser.parse_args()))
    pairs = read_pairs(flags.model_name_a, "--model_name_a", flags.model_name_b, "--model_name_b")
    first, second = model_names([flags.model_name_a, flags.model_name_b])
    dataset = compared_set(flags.dataset, own=True) if flags.dataset else ""
    study = Study(pairs, VoteFile(flags.output), (first, second), dataset, flags.seed)
    if flags.web:
        return rate_in_browser(study, flags.rater or "", flags.port)
    sys.stdin.reconfigure(errors="replace")
    rater = login_name() if flags.rater is None else flags.rater
    TerminalRating(study.session(rater), input, print).run()
    return ""


def login_name() -> str:
    """Who is logged in; "rater" where nobody knows."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "rater"


def rate_in_browser(study: Study, rater: str, port: int | None) -> str:
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


if __name__ == "__main__":
    sys.exit(run_script(run, print, goes_on=True))
