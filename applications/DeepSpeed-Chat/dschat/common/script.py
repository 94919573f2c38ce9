# SPDX-License-Identifier: Apache-2.0
"""What scripts share: how flags are spelled, how they speak and how they end."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable

from dschat.errors import UserError

logger = logging.getLogger(__name__)


def both_spellings(*flags: str) -> list[str]:
    """Long flags, and all of them with dashes and with underscores; those given come first.

    Args:
        flags: such as "--model_name_a".
    """
    words = [flag.removeprefix("--") for flag in flags]
    dashed, underscored = (["--" + w.replace(*pair) for w in words] for pair in (("_", "-"), ("-", "_")))
    return list(dict.fromkeys([*flags, *dashed, *underscored]))


def run_script(run: Callable[[], str], say: Callable[[str], object], goes_on: bool = False) -> int:
    """Runs a script and says what it returns; notes and errors go to stderr.

    Args:
        run: the script; returns the last lines of the output, or nothing where it has said all.
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
        text = run()
        if text:
            say(text)
    except UserError as error:
        logger.error("error: %s", error)
        return 2
    except KeyboardInterrupt:
        kept = "; what was finished is kept, the same command goes on from there" if goes_on else ""
        logger.error("interrupted%s", kept)
        return 130
    return 0
