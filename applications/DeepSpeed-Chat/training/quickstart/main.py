# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline on this machine: `dschat quickstart`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["quickstart", *sys.argv[1:]]))
