# SPDX-License-Identifier: Apache-2.0
"""Data files and folders → parsed rows, each with its place. Nothing but .jsonl, .json and .parquet is opened."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dschat.errors import UserError

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
FOLDER_SUFFIXES = (".jsonl", ".parquet")
TRAIN_PREFIX = "train"
EVAL_PREFIXES = ("valid", "eval", "test")  # the first that has files is used; "valid" includes "validation"
# Where the files of a data set downloaded from the hub lie, below the folder that it was downloaded to.
DOWNLOAD_FOLDERS = ("comparisons", "default", "data", "all")


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and evaluation files of a folder.

    They are called train*, valid*, eval* or test*, or lie in folders of those names; either in `folder` itself or, as
    `hf download` leaves them, in one of DOWNLOAD_FOLDERS below it.

    Raises:
        UserError: no training file, or one both as .jsonl and as .parquet.
    """
    for place in (folder, *(folder / name for name in DOWNLOAD_FOLDERS)):
        train = _matching(place, TRAIN_PREFIX)
        if train:
            held_out = (_matching(place, prefix) for prefix in EVAL_PREFIXES)
            return train, next((files for files in held_out if files), [])
    patterns = ", ".join(f"{TRAIN_PREFIX}*{suffix}" for suffix in FOLDER_SUFFIXES)
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
    raise UserError(
        f"--data_path {folder}: no training file. Looked for {patterns} (and, for evaluation, "
        f"{', '.join(prefix + '*' for prefix in EVAL_PREFIXES)} with the same suffixes); the folder holds: "
        f"{found}. Rename the files, or give one file instead of the folder."
    )


def _matching(folder: Path, prefix: str) -> list[Path]:
    """Files of a folder with this prefix, or else in its sub-folders with it; all of one suffix, by name."""
    if not folder.is_dir():
        return []
    entries = [entry for entry in sorted(folder.iterdir()) if entry.name.startswith(prefix)]
    files = [entry for entry in entries if entry.is_file() and entry.suffix in FOLDER_SUFFIXES]
    if not files:
        inside = (file for entry in entries if entry.is_dir() for file in sorted(entry.iterdir()))
        files = [file for file in inside if file.is_file() and file.suffix in FOLDER_SUFFIXES]
    if len({file.suffix for file in files}) > 1:
        raise UserError(
            f"--data_path {folder}: {prefix}* exists both as .jsonl and as .parquet ("
            f"{', '.join(file.name for file in files)}); keep one of the two, or give one file instead of the folder."
        )
    return files


def read_file(file: Path) -> Iterator[tuple[Any, str]]:
    """Parsed rows of one file, each with its origin.

    Raises:
        UserError: the file or a row of it cannot be read; the message names the file and, where it can, the line.
    """
    try:
        if file.suffix == ".parquet":
            yield from _read_parquet(file)
        elif file.suffix == ".json" and _is_array(file):
            yield from _read_array(file)
        else:
            yield from _read_lines(file)
    except OSError as error:
        raise UserError(f"--data_path: cannot read {file} ({error}); check the file and its permissions.") from error


def _read_lines(file: Path) -> Iterator[tuple[Any, str]]:
    """JSON Lines; blank lines are passed over but counted."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                origin = f"{file}:{number}"
                yield _parse_json(line, origin), origin


def _is_array(file: Path) -> bool:
    """Whether the first character of a .json file opens a list."""
    with open(file, "rb") as opened:
        for line in opened:
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if text:
                return text.startswith(b"[")
    return False


def _read_array(file: Path) -> Iterator[tuple[Any, str]]:
    content = _parse_json(file.read_bytes().removeprefix(b"\xef\xbb\xbf"), str(file))
    for number, raw in enumerate(content, start=1):
        yield raw, f"{file} row {number}"


def _parse_json(text: bytes, origin: str) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"{origin}: not valid JSON ({error.msg} at {place}); correct or remove the row.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not readable as JSON in UTF-8 ({error}); correct or remove the row.") from error


def _read_parquet(file: Path) -> Iterator[tuple[Any, str]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                for raw in batch.to_pylist():
                    number += 1
                    yield raw, f"{file} row {number}"
    except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"--data_path: {file} is not a readable parquet file ({error}); replace it.") from error
