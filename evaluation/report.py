# SPDX-License-Identifier: Apache-2.0
"""Win rates and agreement: `dschat report`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
