# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat` is `dschat`."""

import os
import sys

from dschat.base.errors import UserError
from dschat.cli import main


def run() -> int:
    """Run the command that the process's words name; status 2 where what a launcher has sent cannot be read."""
    if "MA_RLHF_VARIABLES" in os.environ:
        from dschat.remote import receive

        try:
            receive()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return main()


if __name__ == "__main__":
    sys.exit(run())
