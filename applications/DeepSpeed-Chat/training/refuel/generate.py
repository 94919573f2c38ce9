# SPDX-License-Identifier: Apache-2.0
"""Rolls out dialogues of a policy with a simulated user, and each of them once more from one of its turns on.

Writes train.jsonl: trajectory, trajectory_sampled_h_from_sampled_len, sampled_len_from_5, sampled_h_from_sampled_len.
Killed and started again with the same flags, it goes on where it stood. Every flag may be spelled with dashes or
underscores; the key of a server comes from OPENAI_API_KEY.
"""

import sys

from dschat.inference.options import run_command
from dschat.inference.refuel import GenerateOptions

if __name__ == "__main__":
    sys.exit(run_command(GenerateOptions, "dschat.inference.dialogues:run_generate", str(__doc__), print))
