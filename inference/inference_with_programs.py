# SPDX-License-Identifier: Apache-2.0
"""Programs that a model writes, run on tests in a sandbox: `dschat programs`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["programs", *sys.argv[1:]]))
