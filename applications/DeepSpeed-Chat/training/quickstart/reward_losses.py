# SPDX-License-Identifier: Apache-2.0
"""The losses of step 2 side by side: `dschat quickstart reward-losses`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["quickstart", "reward-losses", *sys.argv[1:]]))
