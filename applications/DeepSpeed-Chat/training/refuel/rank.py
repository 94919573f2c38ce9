# SPDX-License-Identifier: Apache-2.0
"""Rewards of REFUEL's dialogues: `dschat refuel-data rank`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["refuel-data", "rank", *sys.argv[1:]]))
