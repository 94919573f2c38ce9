# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat` is `dschat`."""

import sys

from dschat.cli import main

if __name__ == "__main__":
    sys.exit(main())
