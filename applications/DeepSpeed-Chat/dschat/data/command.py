# SPDX-License-Identifier: Apache-2.0
"""The commands `dschat data check`, `dschat data preview` and `dschat data prepare`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dschat.base.errors import UserError
from dschat.base.lock import Lock
from dschat.data.options import CheckOptions, PrepareOptions, PreviewOptions, RowFlags
from dschat.data.prepared.folder import open_prepared, summary_of
from dschat.data.preview import BeginEpisodes, Settings, preview_report

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check(options: CheckOptions) -> str:
    """Prints a report on each source, or on each prepared folder. Returns no last line for the command."""
    settings = _row_settings(options)
    _print_each(options.source.paths, partial(_check_path, options, settings))
    return ""


def preview(options: PreviewOptions, begin_episodes: BeginEpisodes | None = None) -> str:
    """Prints the first rows of each source as training sees them. Returns no last line for the command.

    Args:
        options: flags of the command.
        begin_episodes: gives rows the prompts of their --environment; None without one.
    """
    settings = _row_settings(options)
    _print_each(options.source.paths, partial(_preview_path, options, settings, begin_episodes))
    return ""


def prepare(options: PrepareOptions) -> str:
    """Filters and encodes a source, under the lock of its folder. Returns a summary for the command to print."""
    from dschat.data.prepared import make

    [path] = options.source.paths
    if open_prepared(path) is not None:
        raise UserError(f"--data_path {path}: it is prepared already; give the data that it was made from.")
    tokenizer, end_of_response_id = _open_tokenizer(options.source)
    folder = Path(options.prepared.output).resolve()
    with closing(Lock(folder.with_name(f".{folder.name}.lock"), f"--output {folder}")):
        if folder.exists():
            raise UserError(f"--output {folder}: it exists; remove it, or give another folder.")
        info = make.prepare(path, options, tokenizer, end_of_response_id)
    lines = [f"{path} is prepared in {folder}"]
    for line in summary_of(info):
        lines.append(f"  {line}")
    return "\n".join(lines)


def _print_each(paths: Sequence[str], report: Callable[[str], str]) -> None:
    """Prints the report on each path as soon as it is made, with an empty line between two reports."""
    for number, path in enumerate(paths):
        text = report(path)
        if number > 0:
            print()
        print(text, flush=True)


def _row_settings(options: CheckOptions | PreviewOptions) -> Settings:
    """The settings with which rows are read and encoded."""
    tokenizer = None
    end_of_response_id = None
    if options.source.tokenizer:
        tokenizer, end_of_response_id = _open_tokenizer(options.source)
    lengths = options.lengths
    return Settings(
        keys=options.columns,
        tokenizer=tokenizer,
        max_seq_len=lengths.max_seq_len,
        max_prompt_seq_len=lengths.max_prompt_seq_len,
        end_of_response=end_of_response_id,
        all_turns=lengths.train_on == "all",
    )


def _check_path(options: CheckOptions, settings: Settings, path: str) -> str:
    """The report on a source, or on a prepared folder."""
    from dschat.data.check import check_report, prepared_report

    folder = open_prepared(path)
    if folder is not None:
        return prepared_report(folder, settings.tokenizer)
    return check_report(path, options.check.data_split, settings)


def _preview_path(options: PreviewOptions, settings: Settings, begin_episodes: BeginEpisodes | None, path: str) -> str:
    """The first rows of a source."""
    if open_prepared(path) is not None:
        raise UserError(
            f"preview {path}: a prepared folder, whose rows are encoded already; `dschat data check {path}` "
            "describes it. Preview the data that it was made from."
        )
    flags = options.preview
    colour = sys.stdout.isatty() if flags.colour == "auto" else flags.colour == "always"
    step = flags.step if flags.environment is None else 3  # only step 3 has environments
    return preview_report(path, flags.rows, step, colour, settings, begin_episodes)


def _open_tokenizer(flags: RowFlags) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer of `--tokenizer`, and the id of the token that ends a response.

    Raises:
        UserError: there is no tokenizer, or it lacks an EOS token or the token of --end_of_conversation_token.
    """
    from dschat.models.tokenizer import end_token_id, open_tokenizer

    assert flags.tokenizer is not None
    tokenizer: PreTrainedTokenizerBase = open_tokenizer(flags.tokenizer, "--tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"--tokenizer {flags.tokenizer}: the tokenizer has no eos token; give the model that is to be trained."
        )
    return tokenizer, end_token_id(tokenizer, flags.end_of_conversation_token)
