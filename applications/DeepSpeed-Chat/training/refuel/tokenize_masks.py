# SPDX-License-Identifier: Apache-2.0
"""Makes pairs of tokens and masks from the scored dialogues of rank.py, for refuel.py to train on.

Writes train.parquet and test.parquet: chosen, reject, and of each _token, _mask and _reward. Every flag may be spelled
with dashes or underscores.
"""

import sys

from dschat.common.script import run_script
from dschat.inference.options import parse_flags
from dschat.inference.refuel.options import MaskOptions


def run() -> str:
    """Does it; returns the line that sums it up."""
    options = parse_flags(MaskOptions, sys.argv[1:], str(__doc__))
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the screen is for our own bar and messages
    transformers.utils.logging.set_verbosity_error()
    from dschat.inference.refuel.masks import run_masks

    return run_masks(options)


if __name__ == "__main__":
    sys.exit(run_script(run, print))
