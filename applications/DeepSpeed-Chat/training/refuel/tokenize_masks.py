# SPDX-License-Identifier: Apache-2.0
"""Pairs of tokens for REFUEL: `dschat refuel-data tokenize`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["refuel-data", "tokenize", *sys.argv[1:]]))
