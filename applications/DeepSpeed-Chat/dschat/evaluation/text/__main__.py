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

from dschat.inference.options import TextOptions, run_command

if __name__ == "__main__":
    sys.exit(run_command(TextOptions, "dschat.inference.text:run_text", str(__doc__), print))
