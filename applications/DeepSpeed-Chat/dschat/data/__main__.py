# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.data check PATH` and `preview PATH` look at data before training, `prepare PATH` encodes them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from dschat.common.script import add_flags, flag, run_script
from dschat.data.formats.registry import DATA_VARIABLE, KNOWN_SETS
from dschat.data.formats.rows import DataKeys
from dschat.data.inspect.steps import Settings
from dschat.data.prepared.command import PrepareOptions, run_prepare
from dschat.errors import UserError
from dschat.scoring.programs.sandbox import LEVELS, Level

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATH_HELP = (
    "a .jsonl, .json, .csv (each also as .gz) or .parquet file, a folder with train* files or from save_to_disk, "
    + ", ".join(known.name for known in KNOWN_SETS)
    + f" (from ${DATA_VARIABLE} or the hub), or a data set of the Hugging Face hub"
)


@dataclass(frozen=True)
class Options:
    """The flags of check and preview."""

    tokenizer: str | None = flag("folder or hub id of the model, for lengths in tokens", None)
    max_seq_len: int = flag("longest prompt and response (steps 1, 2)", Settings.max_seq_len)
    max_prompt_seq_len: int = flag("longest prompt (step 3)", Settings.max_prompt_seq_len)
    seed: int = flag("seed of the splits", Settings.seed)
    end_of_conversation_token: str | None = flag("token that ends a response, instead of EOS", None)
    train_on: str = flag("turns of the assistant that step 1 trains on", "last", choices=("all", "last"))
    prompt_key: str = flag("for 'prompt'", DataKeys.prompt)
    chosen_key: str = flag("for 'chosen'", DataKeys.chosen)
    rejected_key: str = flag("for 'rejected'", DataKeys.rejected)
    response_key: str = flag("for 'response'", DataKeys.response)
    messages_key: str = flag("for 'messages'", DataKeys.messages)


@dataclass(frozen=True)
class CheckOptions(Options):
    """Those of check."""

    data_split: str = flag("fractions of the rows that steps 1, 2 and 3 use", "2,4,4")
    run_solutions: int = flag("run the reference solutions of so many rows of APPS, the first, on their tests", 0)
    sandbox_level: str = flag("minimum isolation level of their sandbox", "namespaces", choices=LEVELS)


@dataclass(frozen=True)
class PreviewOptions(Options):
    """Those of preview."""

    rows: int = flag("number of rows", 3, also="n")
    step: int | None = flag("training step; the first that the rows suit if not given", None, choices=(1, 2, 3))
    colour: str = flag("mark parts", "auto", also="color", choices=("auto", "always", "never"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the commands; returns the exit status. The arguments are the process's if `argv` is None."""
    arguments = _parser().parse_args(argv)

    def run() -> str:
        if arguments.command == "prepare" and len(arguments.paths) > 1:
            raise UserError(f"prepare takes one source, not {len(arguments.paths)}: give each an --output of its own.")
        for number, path in enumerate(arguments.paths):
            print("\n" * bool(number) + _report(path, arguments), flush=True)
        return ""

    return run_script(run, print)


def _report(path: str, arguments: argparse.Namespace) -> str:
    for name, least in (("max_seq_len", 1), ("max_prompt_seq_len", 1), ("rows", 1), ("run_solutions", 0)):
        if getattr(arguments, name, 1) < least:
            raise UserError(f"--{name} {getattr(arguments, name)}: give a whole number of at least {least}.")
    if not 0 <= arguments.seed < 2**32:
        raise UserError(f"--seed {arguments.seed}: give a whole number from 0 to {2**32 - 1}.")
    keys = DataKeys(**{field.name: getattr(arguments, f"{field.name}_key") for field in fields(DataKeys)})
    if arguments.command == "prepare":
        return _prepare(path, arguments, keys)
    tokenizer = _open_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    limits = arguments.max_seq_len, arguments.max_prompt_seq_len
    end_id, all_turns = _end_of_response(arguments, tokenizer), arguments.train_on == "all"
    settings = Settings(keys, arguments.seed, tokenizer, *limits, end_id, all_turns)
    if arguments.command == "check":
        from dschat.data.inspect.check import check_report
        from dschat.data.inspect.prepared import prepared_report
        from dschat.data.prepared.folder import open_prepared

        folder = open_prepared(path)
        if folder is not None:
            return prepared_report(folder, tokenizer)
        report = check_report(path, arguments.data_split, settings)
        if arguments.run_solutions:
            report += "\n\n" + _solutions(path, arguments.run_solutions, arguments.sandbox_level, settings)
        return report
    from dschat.data.inspect.preview import preview_report
    from dschat.data.prepared.folder import open_prepared

    if open_prepared(path) is not None:
        raise UserError(
            f"preview {path}: a prepared folder, whose rows are encoded already; `python -m dschat.data check {path}` "
            "describes it. Preview the data that it was made from."
        )
    colour = sys.stdout.isatty() if arguments.colour == "auto" else arguments.colour == "always"
    return preview_report(path, arguments.rows, arguments.step, colour, settings)


def _prepare(path: str, arguments: argparse.Namespace, keys: DataKeys) -> str:
    from dschat.data.prepared.read import find_prepared

    if find_prepared([path]):
        raise UserError(f"--data_path {path}: it is prepared already; give the data that it was made from.")
    tokenizer = _open_tokenizer(arguments.tokenizer)
    end_id = tokenizer.eos_token_id
    if arguments.end_of_conversation_token is not None:
        from dschat.models.tokenizer import end_token_id

        end_id = end_token_id(tokenizer, arguments.end_of_conversation_token)
    return run_prepare(path, arguments, keys, tokenizer, end_id)


def _solutions(path: str, number: int, level: Level, settings: Settings) -> str:
    """How many reference solutions pass their tests, of the first rows."""
    from dschat.data.sources import load_source
    from dschat.scoring.programs.run import ProgramPool
    from dschat.scoring.programs.scores import solutions_report

    source = load_source(path, settings.keys, settings.seed)
    pool = ProgramPool(level, workers=os.cpu_count() or 1)
    lines = solutions_report((source.train + source.eval)[:number], pool)
    return "\n  ".join([f"reference solutions, sandbox level {pool.level}", *lines])


def _open_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, by its folder or hub id. Raises UserError where there is none, or it has no EOS."""
    from dschat.models.tokenizer import open_tokenizer

    tokenizer: PreTrainedTokenizerBase = open_tokenizer(path, "--tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--tokenizer {path}: the tokenizer has no eos token; give the model that is to be trained.")
    return tokenizer


def _end_of_response(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The token that ends a response; None without a tokenizer."""
    token = arguments.end_of_conversation_token
    if tokenizer is None:
        if token is not None:
            raise UserError(f"--end_of_conversation_token {token}: give the model's --tokenizer, too.")
        return None
    from dschat.models.tokenizer import end_token_id

    return end_token_id(tokenizer, token)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dschat.data", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{check,preview,prepare}")
    check_help = "columns, counts, what is dropped and why, shares, duplicates, lengths"
    preview_help = "the first rows as training sees them, with prompt, response and padding"
    prepare_help = "filter, split and encode data once, into a folder that training takes"
    described: tuple[tuple[str, str, type], ...] = (
        ("check", check_help, CheckOptions),
        ("preview", preview_help, PreviewOptions),
        ("prepare", prepare_help, PrepareOptions),
    )
    for name, help, options in described:
        command = commands.add_parser(name, allow_abbrev=False, help=help)
        command.add_argument("paths", nargs="+", metavar="PATH", help=PATH_HELP)
        add_flags(command, options)
    return parser


if __name__ == "__main__":
    sys.exit(main())
