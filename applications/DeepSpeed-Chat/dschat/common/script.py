# SPDX-License-Identifier: Apache-2.0
"""What scripts share: flags from the fields of a dataclass, how they speak and how they end."""

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from dschat.errors import UserError

logger = logging.getLogger(__name__)


def flag(help: str, default: Any = MISSING, also: str = "", **details: Any) -> Any:
    """A field of a dataclass that is a flag.

    Args:
        help: its line in --help.
        default: its value where it is not given; without a default it must be given.
        also: a second name; one of a single letter gets a single dash.
        details: more for `ArgumentParser.add_argument`.
    """
    return field(default=default, metadata={"also": also, "help": help, **details})


def add_flags(parser: argparse.ArgumentParser, options: type, **defaults: Any) -> None:
    """Adds the flags of a dataclass, each spelled with dashes and with underscores; `defaults` go before its own."""
    hints = get_type_hints(options)
    for option in fields(options):
        details = dict(option.metadata)
        names = filter(None, (option.name, details.pop("also")))
        default = defaults.get(option.name, option.default)
        (kind,) = set(get_args(hints[option.name]) or [hints[option.name]]) - {NoneType}  # X, X | None, Sequence[X]
        if kind is bool:
            details |= {"action": "store_true", "dest": option.name, "default": default}
        else:
            details |= {"type": kind, "metavar": kind.__name__.upper(), "required": default is MISSING}
            details["default"] = None if default is MISSING else default
        words = [word for name in names for word in (name.replace("_", "-"), name)]
        spellings = [f"-{word}" if len(word) == 1 else f"--{word}" for word in words]
        parser.add_argument(*dict.fromkeys(spellings), **details)
        if kind is bool and default:
            opposites = [f"--no{spelling.removeprefix('-')}" for spelling in spellings]
            opposites += [f"--no_{spelling.removeprefix('--')}" for spelling in spellings]
            parser.add_argument(*dict.fromkeys(opposites), action="store_false", dest=option.name, help="the opposite")


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
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, for instance `head`, has enough
    except KeyboardInterrupt:
        kept = "; what was finished is kept, the same command goes on from there" if goes_on else ""
        logger.error("interrupted%s", kept)
        return 130
    return 0
