# SPDX-License-Identifier: Apache-2.0
"""`dschat data check PATH` and `preview PATH` look at data before training; `prepare PATH` encodes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dschat.base.atomic import recover_folder
from dschat.base.errors import UserError
from dschat.data.options import CheckOptions, PrepareOptions, PreviewOptions, RowFlags, RowOptions
from dschat.data.prepared.folder import find_prepared, lock_of, open_prepared, summary_of
from dschat.data.preview import BeginEpisodes, Settings, preview_report

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Describe: TypeAlias = Callable[[str, CheckOptions, Settings], str]


def run(
    options: RowOptions,
    describe_solutions: Describe | None = None,
    begin_episodes: BeginEpisodes | None = None,
) -> str:
    """Checks, shows or prepares each source.

    Args:
        options: flags of the subcommand, whose class tells which one it is.
        describe_solutions: runs the reference solutions of a source for --run_solutions; returns lines to print.
        begin_episodes: gives rows the prompts of their --environment.
    """
    for number, path in enumerate(options.source.paths):
        separator = "\n" if number > 0 else ""
        print(separator + _report(path, options, describe_solutions, begin_episodes), flush=True)
    return ""


def _report(
    path: str,
    options: RowOptions,
    describe_solutions: Describe | None,
    begin_episodes: BeginEpisodes | None,
) -> str:
    """The text that the command prints for one path."""
    if isinstance(options, PrepareOptions):
        return _prepare(path, options)
    if isinstance(options, CheckOptions):
        return _check(path, options, describe_solutions)
    assert isinstance(options, PreviewOptions)
    return _preview(path, options, begin_episodes)


def _settings(options: CheckOptions | PreviewOptions) -> Settings:
    """How rows are read and encoded."""
    tokenizer = None
    end_id = None
    if options.source.tokenizer:
        tokenizer, end_id = _open_tokenizer(options.source)
    lengths = options.lengths
    return Settings(
        keys=options.columns,
        seed=options.source.seed,
        tokenizer=tokenizer,
        max_seq_len=lengths.max_seq_len,
        max_prompt_seq_len=lengths.max_prompt_seq_len,
        end_of_response=end_id,
        all_turns=lengths.train_on == "all",
    )


def _check(path: str, options: CheckOptions, describe_solutions: Describe | None) -> str:
    """A report on a source, or on a prepared folder."""
    from dschat.data.check import check_report, prepared_report

    settings = _settings(options)
    folder = open_prepared(path)
    if folder is not None:
        return prepared_report(folder, settings.tokenizer)
    report = check_report(path, options.check.data_split, settings)
    if options.check.run_solutions and describe_solutions is not None:
        report += describe_solutions(path, options, settings)
    return report


def _preview(path: str, options: PreviewOptions, begin_episodes: BeginEpisodes | None) -> str:
    """The first rows of a source as training sees them."""
    settings = _settings(options)
    if open_prepared(path) is not None:
        raise UserError(
            f"preview {path}: a prepared folder, whose rows are encoded already; `dschat data check {path}` "
            "describes it. Preview the data that it was made from."
        )
    flags = options.preview
    colour = sys.stdout.isatty() if flags.colour == "auto" else flags.colour == "always"
    if flags.environment is None:
        return preview_report(path, flags.rows, flags.step, colour, settings)
    return preview_report(path, flags.rows, 3, colour, settings, begin_episodes)


def _prepare(path: str, options: PrepareOptions) -> str:
    """Prepares a source under the lock of its folder; a summary in lines."""
    from dschat.data.prepared.make import prepare

    if find_prepared([path]):
        raise UserError(f"--data_path {path}: it is prepared already; give the data that it was made from.")
    tokenizer, end_id = _open_tokenizer(options.source)
    folder = Path(options.prepared.output)
    with closing(lock_of(folder, "--output")):
        recover_folder(folder.resolve())
        info = prepare(path, options, options.columns, tokenizer, end_id)
    return "\n".join([f"{path} is prepared in {folder}", *(f"  {line}" for line in summary_of(info))])


def _open_tokenizer(flags: RowFlags) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer of a model, and the token that ends a response.

    Raises:
        UserError: there is no tokenizer, it has no EOS, or no such token.
    """
    from dschat.models.tokenizer import end_token_id, open_tokenizer

    tokenizer: PreTrainedTokenizerBase = open_tokenizer(flags.tokenizer or "", "--tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--tokenizer {flags.tokenizer}: the tokenizer has no eos token; give the model that is to be trained."
        )
    return tokenizer, end_token_id(tokenizer, flags.end_of_conversation_token)
