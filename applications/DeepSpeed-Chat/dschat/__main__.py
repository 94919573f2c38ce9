# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat` is `dschat`."""

import sys

from dschat.base.errors import UserError
from dschat.cli import main
from dschat.remote import receive


def run() -> int:
    """Run the command that the process's words name; status 2 where what a launcher has sent cannot be read."""
    try:
        words = receive(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return main(words)


if __name__ == "__main__":
    sys.exit(run())
