# SPDX-License-Identifier: Apache-2.0
"""Step 2 as direct preference optimisation: `dschat dpo` in this process, or as one process of a launcher."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main(["dpo", *sys.argv[1:]], may_launch=False))
