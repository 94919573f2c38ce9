# SPDX-License-Identifier: Apache-2.0
"""Step 3, PPO with macro actions: `dschat ppo` in this process, or as one process of a launcher."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["ppo", *sys.argv[1:]], may_launch=False))
