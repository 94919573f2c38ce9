# SPDX-License-Identifier: Apache-2.0
"""Draws the rows of a file of responses that judges and people compare; the same prompts from every model's file."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from dschat.common.script import add_flags, flag, run_script
from dschat.data.hub import compared_set
from dschat.evaluation.pairs import sample_file


@dataclass
class Flags:
    """The command line."""

    data_path: Path = flag("responses", also="data_file")
    save_path: Path = flag("where they go", also="save_file")
    dataset: str = flag(
        "summarize (by subreddit), hh-rlhf, webgpt or your own name; default: %(default)s", "summarize"
    )
    num: int = flag("rows to draw; default: %(default)s", 50)
    seed: int = flag("default: %(default)s", 42)


def run() -> str:
    """Draws; returns what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_flags(parser, Flags)
    flags = Flags(**vars(parser.parse_args()))
    dataset = compared_set(flags.dataset, own=True)
    return sample_file(flags.data_path, flags.save_path, dataset, flags.num, flags.seed)


if __name__ == "__main__":
    sys.exit(run_script(run, print))
