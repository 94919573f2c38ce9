# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.data check PATH` and `python -m dschat.data preview PATH`: look at data before training on it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.common.script import both_spellings, run_script
from dschat.data.formats.registry import DATA_VARIABLE, KNOWN_SETS
from dschat.data.formats.rows import DataKeys
from dschat.data.inspect.steps import Settings
from dschat.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATH_HELP = (
    "a .jsonl, .json or .parquet file, a folder with train* files, "
    + ", ".join(known.name for known in KNOWN_SETS)
    + f" (from ${DATA_VARIABLE} or the hub), or a data set of the Hugging Face hub"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the two commands; returns the exit status. The arguments are the process's if `argv` is None."""
    arguments = _parser().parse_args(argv)

    def run() -> str:
        for number, path in enumerate(arguments.paths):
            print("\n" * bool(number) + _report(path, arguments), flush=True)
        return ""

    return run_script(run, print)


def _report(path: str, arguments: argparse.Namespace) -> str:
    keys = DataKeys(**{field.name: getattr(arguments, f"{field.name}_key") for field in dataclasses.fields(DataKeys)})
    tokenizer = _open_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    settings = Settings(keys, arguments.seed, tokenizer, arguments.max_seq_len, arguments.max_prompt_seq_len)
    if arguments.command == "check":
        from dschat.data.inspect.check import check_report

        return check_report(path, arguments.data_split, settings)
    from dschat.data.inspect.preview import preview_report

    colour = sys.stdout.isatty() if arguments.colour == "auto" else arguments.colour == "always"
    return preview_report(path, arguments.rows, arguments.step, colour, settings)


def _open_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, by its folder or hub id.

    Raises:
        UserError: there is none, or it has no EOS.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        is_path = Path(path).is_absolute() or path.startswith(".")
        absent = is_path and not Path(path).exists()
        reason = "there is no such folder" if absent else " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"--tokenizer {path}: cannot be opened ({reason}). Give the folder or hub id of a model; download one "
            "with `hf download ID --local-dir DIR`."
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"--tokenizer {path}: the tokenizer has no eos token; give the model that is to be trained.")
    return tokenizer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dschat.data", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check,preview}")
    check_help = "columns, counts, what is dropped and why, shares, duplicates, lengths"
    preview_help = "the first rows as training sees them, with prompt, response and padding"
    check = commands.add_parser("check", allow_abbrev=False, help=check_help)
    preview = commands.add_parser("preview", allow_abbrev=False, help=preview_help)
    for command in (check, preview):
        command.add_argument("paths", nargs="+", metavar="PATH", help=PATH_HELP)
        _flag(command, "tokenizer", metavar="MODEL", help="folder or hub id of the model, for lengths in tokens")
        longest, longest_prompt = Settings.max_seq_len, Settings.max_prompt_seq_len
        _flag(command, "max_seq_len", type=_count, default=longest, help="longest prompt and response (steps 1, 2)")
        _flag(command, "max_prompt_seq_len", type=_count, default=longest_prompt, help="longest prompt (step 3)")
        _flag(command, "seed", type=_seed, default=Settings.seed, help="seed of the splits")
        for field in dataclasses.fields(DataKeys):
            _flag(command, f"{field.name}_key", default=field.default, metavar="COLUMN", help=f"for {field.name!r}")
    _flag(check, "data_split", default="2,4,4", help="fractions of the rows that steps 1, 2 and 3 use")
    preview.add_argument("-n", "--rows", type=_count, default=3, help="number of rows")
    step_help = "training step; the first that the rows suit if not given"
    _flag(preview, "step", type=int, choices=(1, 2, 3), help=step_help)
    preview.add_argument("--colour", "--color", choices=("auto", "always", "never"), default="auto", help="mark parts")
    return parser


def _flag(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    parser.add_argument(*both_spellings(f"--{name}"), **options)


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
