# SPDX-License-Identifier: Apache-2.0
"""Answers APPS's problems with a model and runs the programs on the problems' tests, in a sandbox.

Writes PROJ_PATH/results/DATASET/temperature=T/MODEL.jsonl: prompt, difficulty, and of each sample its response and
what became of it. Killed and started again with the same flags, it goes on where it stood. Every flag may be spelled
with dashes or underscores.
"""

import sys

from dschat.inference.options import ProgramOptions, run_command

if __name__ == "__main__":
    sys.exit(run_command(ProgramOptions, "dschat.inference.programs:run_programs", str(__doc__), print))
