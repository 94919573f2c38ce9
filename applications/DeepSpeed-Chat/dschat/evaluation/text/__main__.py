# SPDX-License-Identifier: Apache-2.0
"""Perplexity and ROUGE of policies, loss and accuracy of reward models, on a split of a data set.

    python -m dschat.evaluation.text --model FOLDER --data tldr --num-samples 500 --output text
    python -m dschat.evaluation.text --reward-model FOLDER --data tldr --output text
    python -m dschat.evaluation.text --checkpoints RUN --data tldr --output text   # all models that a run kept

Writes into the folder of --output: rows.jsonl, a row for each model and text; report.md, report.json and report.png.
Killed and started again with the same flags, it goes on where it stood. Every flag may be spelled with dashes or
underscores.
"""

import sys

from dschat.common.script import run_script
from dschat.inference.options import parse_flags
from dschat.inference.text_options import TextOptions


def run() -> str:
    """Computes what is left to compute and writes the report; returns the tables."""
    options = parse_flags(TextOptions, sys.argv[1:], str(__doc__))
    import transformers

    transformers.utils.logging.disable_progress_bar()  # the screen is for our own bar and messages
    transformers.utils.logging.set_verbosity_error()
    from dschat.inference.text import run_text

    return run_text(options)


if __name__ == "__main__":
    sys.exit(run_script(run, print, goes_on=True))
