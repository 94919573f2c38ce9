# SPDX-License-Identifier: Apache-2.0
"""The rows that judges and people compare: `dschat sample`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["sample", *sys.argv[1:]]))
