# SPDX-License-Identifier: Apache-2.0
"""Answers APPS's problems with a model and runs the programs on the problems' tests, in a sandbox.

Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, difficulty, and of each sample its response and
what became of it. Killed and started again with the same flags, it goes on where it stood. Every flag may be spelled
with dashes or underscores.
"""

import os
import sys

from dschat.common.script import run_script
from dschat.inference.options import ProgramOptions, parse_flags


def run() -> str:
    """Answers and runs; returns the line that sums it up."""
    options = parse_flags(ProgramOptions, sys.argv[1:], str(__doc__))
    os.environ.setdefault("MA_RLHF_DATA", str(options.proj_path / "data"))
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the screen is for our own bar and messages
    transformers.utils.logging.set_verbosity_error()
    from dschat.inference.programs import run_programs

    return run_programs(options)


if __name__ == "__main__":
    sys.exit(run_script(run, print, goes_on=True))
