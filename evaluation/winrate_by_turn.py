# SPDX-License-Identifier: Apache-2.0
"""Win rate by turn: `dschat judge-turns`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["judge-turns", *sys.argv[1:]]))
