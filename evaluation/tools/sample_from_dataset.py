# SPDX-License-Identifier: Apache-2.0
"""Draws the rows of a file of responses that judges and people compare; the same prompts from every model's file."""

import argparse
import sys
from pathlib import Path

from dschat.common.script import both_spellings, run_script
from dschat.data.formats.registry import compared_set
from dschat.evaluation.pairs.sampling import sample_file


def run() -> str:
    """Draws; returns what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for what, help in (("data", "responses"), ("save", "where they go")):
        spellings = both_spellings(f"--{what}-path", f"--{what}-file")
        parser.add_argument(*spellings, type=Path, required=True, metavar="FILE", help=help)
    datasets = "summarize (by subreddit), hh-rlhf or webgpt"
    parser.add_argument("--dataset", default="summarize", metavar="NAME", help=datasets)
    parser.add_argument("--num", type=int, default=50, metavar="N", help="rows to draw; default: %(default)s")
    parser.add_argument("--seed", type=int, default=42, help="default: %(default)s")
    flags = parser.parse_args()
    return sample_file(flags.data_path, flags.save_path, compared_set(flags.dataset), flags.num, flags.seed)


if __name__ == "__main__":
    sys.exit(run_script(run, print))
