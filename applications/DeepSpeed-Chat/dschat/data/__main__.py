# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.data check PATH` and `preview PATH` look at data before training, `prepare PATH` encodes them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dschat.common.atomic import recover_folder
from dschat.common.script import add_flags, flag, run_script
from dschat.data.hub import DATA_VARIABLE, KNOWN_SETS
from dschat.data.prepared.folder import SKIPPED, STAGES, find_prepared, lock_of, open_prepared, summary_of
from dschat.data.preview import Settings, preview_report
from dschat.data.rows import DataKeys
from dschat.errors import UserError
from dschat.scoring.programs.sandbox import LEVELS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PATH_HELP = (
    "a .jsonl, .json, .csv (each also as .gz) or .parquet file, a folder with train* files or from save_to_disk, "
    + ", ".join(known.name for known in KNOWN_SETS)
    + f" (from ${DATA_VARIABLE} or the hub), or a data set of the Hugging Face hub"
)
UNITS = ("tokens", "characters")
# The smallest value of a flag that is a number.
LEAST = {"max_seq_len": 1, "max_prompt_seq_len": 1, "rows": 1, "run_solutions": 0, "max_length": 2}
LEAST |= {"max_prompt_length": 1, "minimum_response_length": 0, "num_samples": 1}

T = TypeVar("T")


@dataclass(frozen=True)
class RowOptions:
    """The flags of all three commands."""

    end_of_conversation_token: str | None = flag("token that ends a response, instead of EOS", None)
    prompt_key: str = flag("for 'prompt'", DataKeys.prompt)
    chosen_key: str = flag("for 'chosen'", DataKeys.chosen)
    rejected_key: str = flag("for 'rejected'", DataKeys.rejected)
    response_key: str = flag("for 'response'", DataKeys.response)
    messages_key: str = flag("for 'messages'", DataKeys.messages)


@dataclass(frozen=True)
class Options:
    """Those of check and preview."""

    tokenizer: str | None = flag("folder or hub id of the model, for lengths in tokens", None)
    max_seq_len: int = flag("longest prompt and response (steps 1, 2)", Settings.max_seq_len)
    max_prompt_seq_len: int = flag("longest prompt (step 3)", Settings.max_prompt_seq_len)
    seed: int = flag("seed of the splits", Settings.seed)
    train_on: str = flag("turns of the assistant that step 1 trains on", "last", choices=("all", "last"))


@dataclass(frozen=True)
class CheckOptions(Options):
    """Those of check."""

    data_split: str = flag("fractions of the rows that steps 1, 2 and 3 use", "2,4,4")
    run_solutions: int = flag("run the reference solutions of so many rows of APPS, the first, on their tests", 0)
    sandbox_level: str = flag("minimum isolation level of the sandbox for them", "namespaces", choices=LEVELS)


@dataclass(frozen=True)
class PreviewOptions(Options):
    """Those of preview."""

    rows: int = flag("number of rows", 3, also="n")
    step: int | None = flag("training step; the first that the rows suit if not given", None, choices=(1, 2, 3))
    colour: str = flag("mark parts", "auto", also="color", choices=("auto", "always", "never"))


@dataclass(frozen=True)
class PrepareOptions:
    """Those of prepare."""

    output: str = flag("folder to write; training takes it as --data_path")
    tokenizer: str = flag("folder or hub id of the model to train")
    stage: str = flag("finetune: for step 1; preference: for step 2 and DPO", "finetune", choices=STAGES)
    max_length: int = flag("tokens of prompt and response; the rest is cut", 512)
    max_prompt_length: int = flag("longest prompt; rows with a longer one are left out", 512)
    minimum_response_length: int = flag("shortest response; rows with a shorter one are left out", 5)
    length_unit: str = flag("what the two limits above count: tokens or characters", "tokens", choices=UNITS)
    remove_same_inputs: bool = flag("leave out rows whose prompt and (chosen) response were there before", True)
    remove_same_responses: bool = flag("leave out pairs of equal texts", True)
    num_samples: int | None = flag("of training and of test rows, only the first so many", None)
    mask_prompt: bool = flag("step 1 is to learn from responses alone", True)
    validation_percentage: float = flag("part of the training rows for validation, 0.1 = a tenth", 0.1)
    data_split: str = flag("parts of the rows for finetune and preference", "1,1,0")
    shuffle: bool = flag("draw these parts by the seed, as training does; else they follow each other", True)
    seed: int = flag("of the shuffle", 1234)
    save_skipped: bool = flag(f"write the rows that are left out to {SKIPPED}", False)
    format: str = flag("of the files: parquet, or pt as SheepRL's", "parquet", choices=("parquet", "pt"))
    overwrite: bool = flag("replace a prepared folder", False)


COMMANDS: dict[str, tuple[str, type]] = {
    "check": ("columns, counts, what is dropped and why, shares, duplicates, lengths", CheckOptions),
    "preview": ("the first rows as training sees them, with prompt, response and padding", PreviewOptions),
    "prepare": ("filter, split and encode data once, into a folder that training takes", PrepareOptions),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one of the commands; returns the exit status. The arguments are the process's if `argv` is None."""
    parser = argparse.ArgumentParser(prog="python -m dschat.data", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, (help, options) in COMMANDS.items():
        command = commands.add_parser(name, allow_abbrev=False, help=help)
        command.add_argument("paths", nargs="+", metavar="PATH", help=PATH_HELP)
        add_flags(command, options)
        add_flags(command, RowOptions)
    arguments = parser.parse_args(argv)

    def run() -> str:
        _check(arguments)
        for number, path in enumerate(arguments.paths):
            print("\n" * bool(number) + _report(path, arguments), flush=True)
        return ""

    return run_script(run, print)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.command == "prepare" and len(arguments.paths) > 1:
        raise UserError(f"prepare takes one source, not {len(arguments.paths)}: give each an --output of its own.")
    for name, least in LEAST.items():
        value = getattr(arguments, name, None)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: give a whole number of at least {least}.")
    if not 0 <= arguments.seed < 2**32:
        raise UserError(f"--seed {arguments.seed}: give a whole number from 0 to {2**32 - 1}.")
    part = getattr(arguments, "validation_percentage", 0)
    if not 0 <= part < 1:
        raise UserError(f"--validation_percentage {part}: give a part from 0 to below 1; a tenth is 0.1.")
    token = arguments.end_of_conversation_token
    if token is not None and arguments.tokenizer is None:
        raise UserError(f"--end_of_conversation_token {token}: give the model's --tokenizer, too.")


def _report(path: str, arguments: argparse.Namespace) -> str:
    """What the command says of one path."""
    keys = DataKeys(**{field.name: getattr(arguments, f"{field.name}_key") for field in fields(DataKeys)})
    if arguments.command == "prepare":
        return _prepare(path, arguments, keys)
    tokenizer, end_id = _open_tokenizer(arguments) if arguments.tokenizer else (None, None)
    limits = arguments.max_seq_len, arguments.max_prompt_seq_len
    settings = Settings(keys, arguments.seed, tokenizer, *limits, end_id, arguments.train_on == "all")
    folder = open_prepared(path)
    if arguments.command == "check":
        from dschat.data.check import check_report, prepared_report

        if folder is not None:
            return prepared_report(folder, tokenizer)
        report = check_report(path, arguments.data_split, settings)
        return report + (_solutions(path, arguments, settings) if arguments.run_solutions else "")
    if folder is not None:
        raise UserError(
            f"preview {path}: a prepared folder, whose rows are encoded already; `python -m dschat.data check {path}` "
            "describes it. Preview the data that it was made from."
        )
    colour = sys.stdout.isatty() if arguments.colour == "auto" else arguments.colour == "always"
    return preview_report(path, arguments.rows, arguments.step, colour, settings)


def _prepare(path: str, arguments: argparse.Namespace, keys: DataKeys) -> str:
    """Prepares a source, alone in its folder; what was made of it, in lines."""
    from dschat.data.prepared.make import Preparation, RowLimits, Target, prepare

    if find_prepared([path]):
        raise UserError(f"--data_path {path}: it is prepared already; give the data that it was made from.")
    tokenizer, end_id = _open_tokenizer(arguments)
    limits = _from_flags(RowLimits, arguments, unit=arguments.length_unit)
    preparation = _from_flags(Preparation, arguments, limits=limits, keys=keys)
    target = _from_flags(Target, arguments, folder=Path(arguments.output))
    with closing(lock_of(target.folder, "--output")):
        recover_folder(target.folder.resolve())
        info = prepare(path, preparation, target, tokenizer, arguments.tokenizer, end_id)
    return "\n".join([f"{path} is prepared in {target.folder}", *(f"  {line}" for line in summary_of(info))])


def _from_flags(kind: type[T], arguments: argparse.Namespace, **given: Any) -> T:
    """A dataclass whose fields are flags, but for those that are given."""
    names = [field.name for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    return kind(**given, **{name: getattr(arguments, name) for name in names})


def _solutions(path: str, arguments: argparse.Namespace, settings: Settings) -> str:
    """How many reference solutions pass their tests, of the first rows."""
    from dschat.data.sources import load_source
    from dschat.scoring.programs.run import ProgramPool
    from dschat.scoring.programs.scores import solutions_report

    source = load_source(path, settings.keys, settings.seed)
    pool = ProgramPool(arguments.sandbox_level, workers=os.cpu_count() or 1)
    lines = solutions_report((source.train + source.eval)[: arguments.run_solutions], pool)
    return "\n  ".join([f"\n\nreference solutions, sandbox level {pool.level}", *lines])


def _open_tokenizer(arguments: argparse.Namespace) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer of a model, and the token that ends a response.

    Raises:
        UserError: there is no tokenizer, it has no EOS, or no such token.
    """
    from dschat.models.tokenizer import end_token_id, open_tokenizer

    tokenizer: PreTrainedTokenizerBase = open_tokenizer(arguments.tokenizer, "--tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--tokenizer {arguments.tokenizer}: the tokenizer has no eos token; give the model that is to be trained."
        )
    return tokenizer, end_token_id(tokenizer, arguments.end_of_conversation_token)


if __name__ == "__main__":
    sys.exit(main())
