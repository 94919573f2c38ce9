# SPDX-License-Identifier: Apache-2.0
"""The learners side by side: `dschat quickstart learners`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["quickstart", "learners", *sys.argv[1:]]))
