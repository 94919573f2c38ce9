# SPDX-License-Identifier: Apache-2.0
"""Dialogues for REFUEL: `dschat refuel-data generate`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["refuel-data", "generate", *sys.argv[1:]]))
