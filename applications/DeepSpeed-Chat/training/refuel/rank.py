# SPDX-License-Identifier: Apache-2.0
"""Scores the dialogues of generate.py with a reward model, as they stand at the end of each turn.

Writes train.jsonl: the columns it read, and the rewards of both dialogues; what could not be scored is -99999. Killed
and started again with the same flags, it goes on where it stood. Every flag may be spelled with dashes or underscores.
"""

import sys

from dschat.inference.options import run_command
from dschat.inference.refuel import RankOptions

if __name__ == "__main__":
    sys.exit(run_command(RankOptions, "dschat.inference.pairs:run_rank", str(__doc__), print))
