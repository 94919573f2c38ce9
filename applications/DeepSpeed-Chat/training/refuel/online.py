# SPDX-License-Identifier: Apache-2.0
"""REFUEL with users from data: `dschat refuel-online` in this process, or as one process of a launcher."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["refuel-online", *sys.argv[1:]], may_launch=False))
