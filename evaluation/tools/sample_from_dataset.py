# SPDX-License-Identifier: Apache-2.0
"""Draws the rows of a file of responses that judges and people compare; the same prompts from every model's file."""

import argparse
import sys
from pathlib import Path

from dschat.common.script import both_spellings, run_script
from dschat.evaluation.pairs.dataset_names import dataset_name
from dschat.evaluation.pairs.sampling import sample_file


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for what, help in (("data", "responses"), ("save", "where they go")):
        flags = both_spellings(f"--{what}-path", f"--{what}-file")
        parser.add_argument(*flags, type=Path, required=True, metavar="FILE", help=help)
    parser.add_argument(
        "--dataset", default="summarize", metavar="NAME", help="summarize (by subreddit), hh-rlhf or webgpt"
    )
    parser.add_argument("--num", type=int, default=50, metavar="N", help="rows to draw; default: %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    return parser.parse_args()


def run() -> str:
    """Draws; returns what was drawn."""
    flags = parse()
    return sample_file(flags.data_path, flags.save_path, dataset_name(flags.dataset), flags.num, flags.seed)


if __name__ == "__main__":
    sys.exit(run_script(run, print))
