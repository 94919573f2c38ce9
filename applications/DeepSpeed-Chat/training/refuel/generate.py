# SPDX-License-Identifier: Apache-2.0
"""Rolls out dialogues of a policy with a simulated user, and each of them once more from one of its turns on.

Writes train.jsonl: trajectory, trajectory_sampled_h_from_sampled_len, sampled_len_from_5, sampled_h_from_sampled_len.
Killed and started again with the same flags, it goes on where it stood. Every flag may be spelled with dashes or
underscores; the key of a server comes from OPENAI_API_KEY.
"""

import sys

from dschat.common.script import run_script
from dschat.inference.options import parse_flags
from dschat.inference.refuel.options import GenerateOptions


def run() -> str:
    """Does it; returns the line that sums it up."""
    options = parse_flags(GenerateOptions, sys.argv[1:], str(__doc__))
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the screen is for our own bar and messages
    transformers.utils.logging.set_verbosity_error()
    from dschat.inference.refuel.generate import run_generate

    return run_generate(options)


if __name__ == "__main__":
    sys.exit(run_script(run, print, goes_on=True))
