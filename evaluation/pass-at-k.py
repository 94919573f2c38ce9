# SPDX-License-Identifier: Apache-2.0
"""pass@k of programs: `dschat pass-at-k`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["pass-at-k", *sys.argv[1:]]))
