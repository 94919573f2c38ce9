# SPDX-License-Identifier: Apache-2.0
"""Rewards of the best of N responses at several temperatures, and of a single response at each.

Writes into PROJ_PATH/results/DATASET/best-of-n: MODEL.jsonl with all responses and their rewards, a row for each
prompt and temperature; MODEL.md and MODEL.json, the table; MODEL.png, the curves. Killed and started again with the
same flags, it goes on where it stood. Every flag may be spelled with dashes or underscores.
"""

import sys

from dschat.inference.options import BestOfOptions, run_command

if __name__ == "__main__":
    sys.exit(run_command(BestOfOptions, "dschat.inference.scored:run_best_of_n", str(__doc__), print))
