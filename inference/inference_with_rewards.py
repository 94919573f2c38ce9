# SPDX-License-Identifier: Apache-2.0
"""Responses with rewards: `dschat generate`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
