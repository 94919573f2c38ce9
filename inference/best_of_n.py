# SPDX-License-Identifier: Apache-2.0
"""The best of N responses: `dschat best-of-n`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["best-of-n", *sys.argv[1:]]))
