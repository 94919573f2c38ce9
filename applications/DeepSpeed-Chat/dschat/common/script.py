# SPDX-License-Identifier: Apache-2.0
"""What commands share: how they speak and how they end."""

import io
import logging
import os
import sys
from collections.abc import Callable

from dschat.errors import UserError

logger = logging.getLogger(__name__)


def run_script(run: Callable[[], str | int], say: Callable[[str], object], goes_on: bool = False) -> int:
    """Runs a script and says what it returns; notes and errors go to stderr.

    Args:
        run: the script; returns the last lines of the output, nothing where it has said all, or a status.
        say: writes a line to stdout: print.
        goes_on: after Ctrl-C the same command goes on where it stood.

    Returns:
        The exit status: 0; 2 after a UserError; 130 after Ctrl-C.
    """
    logging.basicConfig(format="%(message)s")  # libraries' warnings
    logging.getLogger("dschat").setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        found = run()
        if isinstance(found, int):
            return found
        if found:
            say(found)
    except UserError as error:
        logger.error("error: %s", error)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, for instance `head`, has enough
    except KeyboardInterrupt:
        kept = "; what was finished is kept, the same command goes on from there" if goes_on else ""
        logger.error("interrupted%s", kept)
        return 130
    return 0
