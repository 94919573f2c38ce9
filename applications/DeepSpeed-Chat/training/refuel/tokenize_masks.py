# SPDX-License-Identifier: Apache-2.0
"""Makes pairs of tokens and masks from the scored dialogues of rank.py, for refuel.py to train on.

Writes train.parquet and test.parquet: chosen, reject, and of each _token, _mask and _reward. Every flag may be spelled
with dashes or underscores.
"""

import sys

from dschat.inference.options import run_command
from dschat.inference.refuel import MaskOptions

if __name__ == "__main__":
    sys.exit(run_command(MaskOptions, "dschat.inference.pairs:run_masks", str(__doc__), print, goes_on=False))
