# SPDX-License-Identifier: Apache-2.0
"""Rewards of the best of N responses at several temperatures, and of a single response at each.

Writes into PROJ_PATH/results/DATASET/best-of-n: MODEL.jsonl with all responses and their rewards, a row for each
prompt and temperature; MODEL.md and MODEL.json, the table; MODEL.png, the curves. Killed and started again with the
same flags, it goes on where it stood. Every flag may be spelled with dashes or underscores.
"""

import os
import sys

from dschat.common.script import run_script
from dschat.inference.options import BestOfOptions, parse_flags


def run() -> str:
    """Draws, scores and draws the curves; returns the table."""
    options = parse_flags(BestOfOptions, sys.argv[1:], str(__doc__))
    os.environ.setdefault("MA_RLHF_DATA", str(options.proj_path / "data"))
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the screen is for our own bar and messages
    transformers.utils.logging.set_verbosity_error()
    from dschat.inference.best_of_n import run_best_of_n

    return run_best_of_n(options)


if __name__ == "__main__":
    sys.exit(run_script(run, print, goes_on=True))
