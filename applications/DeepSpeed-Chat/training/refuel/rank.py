# SPDX-License-Identifier: Apache-2.0
"""Scores the dialogues of generate.py with a reward model, as they stand at the end of each turn.

Writes train.jsonl: the columns it read, and the rewards of both dialogues; what could not be scored is -99999. Killed
and started again with the same flags, it goes on where it stood. Every flag may be spelled with dashes or underscores.
"""

import sys

from dschat.common.script import run_script
from dschat.inference.options import parse_flags
from dschat.inference.refuel.options import RankOptions


def run() -> str:
    """Does it; returns the line that sums it up."""
    options = parse_flags(RankOptions, sys.argv[1:], str(__doc__))
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the screen is for our own bar and messages
    transformers.utils.logging.set_verbosity_error()
    from dschat.inference.refuel.rank import run_rank

    return run_rank(options)


if __name__ == "__main__":
    sys.exit(run_script(run, print, goes_on=True))
