# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.data check PATH` and `python -m dschat.data preview PATH`: look at data before training on it."""

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from dschat.data.formats.registry import DATA_VARIABLE, KNOWN_SETS
from dschat.data.formats.rows import DataKeys
from dschat.errors import UserError

PATH_HELP = (
    "a .jsonl, .json or .parquet file, a folder with train* files, "
    + ", ".join(known.name for known in KNOWN_SETS)
    + f" (from ${DATA_VARIABLE} or the hub), or a data set of the Hugging Face hub"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the two commands.

    Args:
        argv: arguments; those of the process if None.

    Returns:
        The exit status: 0, or 2 after bad input, whose message goes to stderr.
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        for number, path in enumerate(arguments.paths):
            print("\n" * bool(number) + _report(path, arguments), flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader, for instance `head`, has enough
    return 0


def _report(path: str, arguments: argparse.Namespace) -> str:
    from dschat.data.encoding import open_tokenizer
    from dschat.data.inspect.check import Limits, check_report

    keys = DataKeys(**{field.name: getattr(arguments, f"{field.name}_key") for field in dataclasses.fields(DataKeys)})
    limits = Limits(arguments.max_seq_len, arguments.max_prompt_seq_len)
    tokenizer = open_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    if arguments.command == "check":
        return check_report(path, keys, arguments.data_split, arguments.seed, tokenizer, limits)
    from dschat.data.inspect.preview import preview_report

    colour = sys.stdout.isatty() if arguments.colour == "auto" else arguments.colour == "always"
    return preview_report(path, keys, arguments.rows, tokenizer, arguments.step, limits, colour, arguments.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dschat.data", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check,preview}")
    check = commands.add_parser(
        "check", allow_abbrev=False, help="columns, counts, what is dropped and why, shares, duplicates, lengths"
    )
    preview = commands.add_parser(
        "preview", allow_abbrev=False, help="the first rows as training sees them, with prompt, response and padding"
    )
    for command in (check, preview):
        command.add_argument("paths", nargs="+", metavar="PATH", help=PATH_HELP)
        _flag(command, "tokenizer", metavar="MODEL", help="folder or hub id of the model, for lengths in tokens")
        _flag(command, "max_seq_len", type=_count, default=1024, help="longest prompt and response (steps 1, 2)")
        _flag(command, "max_prompt_seq_len", type=_count, default=512, help="longest prompt (step 3)")
        _flag(command, "seed", type=_seed, default=1234, help="seed of the splits")
        for field in dataclasses.fields(DataKeys):
            _flag(command, f"{field.name}_key", default=field.default, metavar="COLUMN", help=f"for {field.name!r}")
    _flag(check, "data_split", default="2,4,4", help="fractions of the rows that steps 1, 2 and 3 use")
    preview.add_argument("-n", "--rows", type=_count, default=3, help="number of rows")
    _flag(
        preview, "step", type=int, choices=(1, 2, 3), help="training step; the first that the rows suit if not given"
    )
    preview.add_argument("--colour", "--color", choices=("auto", "always", "never"), default="auto", help="mark parts")
    return parser


def _flag(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """A flag in both spellings, --max_seq_len and --max-seq-len."""
    parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), **options)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 4294967295")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
