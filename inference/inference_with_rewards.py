# SPDX-License-Identifier: Apache-2.0
"""Answers a data set's held-out prompts with a model and scores the responses with a reward model.

Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, response, reward, finished. Killed and started
again with the same flags, it goes on where it stood. Every flag may be spelled with dashes or underscores.
"""

import os
import sys

from dschat.common.script import run_script
from dschat.inference.options import InferenceOptions, parse_flags


def run() -> str:
    """Answers and scores; returns the line that sums it up."""
    options = parse_flags(InferenceOptions, sys.argv[1:], str(__doc__))
    os.environ.setdefault("MA_RLHF_DATA", str(options.proj_path / "data"))
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the screen is for our own bar and messages
    transformers.utils.logging.set_verbosity_error()
    from dschat.inference.run import run_inference

    return run_inference(options)


if __name__ == "__main__":
    sys.exit(run_script(run, print, goes_on=True))
