# SPDX-License-Identifier: Apache-2.0
"""People compare the responses of two models: in the terminal, or with --web in a browser.

Every vote is saved at once. The same command goes on where the rater stopped.
"""

import argparse
import getpass
import sys
import threading
from pathlib import Path

from dschat.common.script import both_spellings, run_script
from dschat.evaluation.human.session import Study
from dschat.evaluation.human.terminal import TerminalRating
from dschat.evaluation.human.vote_file import VoteFile
from dschat.evaluation.pairs.dataset_names import dataset_name
from dschat.evaluation.pairs.responses import model_names, read_pairs


def run() -> str:
    """Parses the flags and asks; returns what is left to say."""
    args = parse()
    study = open_study(args)
    if args.web:
        return rate_in_browser(study, args.rater or "", args.port)
    sys.stdin.reconfigure(errors="replace")
    TerminalRating(study.session(login_name() if args.rater is None else args.rater), input, print).run()
    return ""


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for letter, which in (("a", "first"), ("b", "second")):
        spellings = both_spellings(f"--model_name_{letter}", f"--model_{letter}")
        parser.add_argument(*spellings, type=Path, required=True, help=f"responses of the {which} model (.jsonl)")
    parser.add_argument("--output", type=Path, required=True, help="file of the votes (.jsonl); votes in it are kept")
    parser.add_argument("--dataset", default="", help="summarize, hh-rlhf or webgpt: its guidelines are shown")
    parser.add_argument("--rater", help="name of the person who votes (default: the login name; --web asks)")
    parser.add_argument("--seed", type=int, default=42, help="of the shuffling of sides (default 42)")
    parser.add_argument("--web", action="store_true", help="vote in a browser on this machine (needs the extra ui)")
    parser.add_argument("--port", type=int, help="of --web (default: the first free one from 7860)")
    return parser.parse_args()


def open_study(args: argparse.Namespace) -> Study:
    """The pairs, and the votes there are."""
    pairs = read_pairs(args.model_name_a, "--model_name_a", args.model_name_b, "--model_name_b")
    names = model_names([args.model_name_a, args.model_name_b])
    dataset = dataset_name(args.dataset) if args.dataset else ""
    return Study(pairs, VoteFile(args.output), *names, dataset=dataset, seed=args.seed)


def login_name() -> str:
    """Who is logged in; "rater" where nobody knows."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "rater"


def rate_in_browser(study: Study, rater: str, port: int | None) -> str:
    """Serves the page until Ctrl-C; returns how far everybody is."""
    from dschat.evaluation.human.page import serve

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
