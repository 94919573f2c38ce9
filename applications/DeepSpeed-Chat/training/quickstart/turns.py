# SPDX-License-Identifier: Apache-2.0
"""Episodes of several turns with environments: `dschat quickstart turns`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["quickstart", "turns", *sys.argv[1:]]))
