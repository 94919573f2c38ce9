# SPDX-License-Identifier: Apache-2.0
"""People compare two models: `dschat vote`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["vote", *sys.argv[1:]]))
