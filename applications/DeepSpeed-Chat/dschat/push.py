# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.push` is `dschat push`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["push", *sys.argv[1:]]))
