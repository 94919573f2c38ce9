# SPDX-License-Identifier: Apache-2.0
"""The pipeline with rewards by execution: `dschat quickstart programs`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["quickstart", "programs", *sys.argv[1:]]))
