# SPDX-License-Identifier: Apache-2.0
"""Answers a data set's held-out prompts with a model and scores the responses with a reward model.

Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, response, reward, finished. Killed and started
again with the same flags, it goes on where it stood. Every flag may be spelled with dashes or underscores.
"""

import sys

from dschat.inference.options import InferenceOptions, run_command

if __name__ == "__main__":
    sys.exit(run_command(InferenceOptions, "dschat.inference.scored:run_inference", str(__doc__), print))
