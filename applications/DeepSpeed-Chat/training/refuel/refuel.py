# SPDX-License-Identifier: Apache-2.0
"""REFUEL on pairs of dialogues: `dschat refuel` in this process, or as one process of a launcher."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["refuel", *sys.argv[1:]], may_launch=False))
