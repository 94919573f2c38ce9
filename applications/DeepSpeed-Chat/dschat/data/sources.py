# SPDX-License-Identifier: Apache-2.0
"""Data files and folders → `Source`: training and evaluation rows, with the place of each row for messages."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat.data.formats import NO_TEXT, DataKeys, Row, parse_row
from dschat.data.splits import train_eval_indices
from dschat.errors import UserError

__all__ = ["DataKeys", "Row", "Source", "load_source"]

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
FOLDER_SUFFIXES = (".jsonl", ".parquet")
TRAIN_PREFIX = "train"
EVAL_PREFIXES = ("valid", "eval", "test")  # the first that has files is used; "valid" includes "validation"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The rows of one `--data_path`.

    Attributes:
        name: name of the folder, or of the file without its suffix.
        train: training rows.
        eval: evaluation rows.
        files: the files that were read, in order.
        dropped: reason → number of rows left out.
    """

    name: str
    train: list[Row] = field(repr=False)
    eval: list[Row] = field(repr=False)
    files: tuple[Path, ...]
    dropped: dict[str, int]


def load_source(path: str | Path, keys: DataKeys | None = None, seed: int = 1234) -> Source:
    """Reads one source. Nothing is downloaded or executed.

    Args:
        path: a .jsonl, .json or .parquet file, or a folder with train*.jsonl or train*.parquet and, optionally,
            valid*, eval* or test* files of either suffix. Without evaluation files the rows are split 95 to 5.
        keys: column names; the defaults of `DataKeys` if None.
        seed: seed of the 95 to 5 split.

    Returns:
        The source, with rows in the order of the files, or of the split where there is one.

    Raises:
        UserError: nothing to read, a file that cannot be read, or a bad row, named by file and line.
    """
    keys = keys or DataKeys()
    root = Path(path)
    if root.is_dir():
        name, train_files, eval_files = root.resolve().name, *_find_files(root)
    elif root.is_file():
        name, train_files, eval_files = root.stem, [root], []
        if root.suffix not in FILE_SUFFIXES:
            raise UserError(
                f"--data_path {path}: not a data file; give a file that ends in {', '.join(FILE_SUFFIXES)}."
            )
    else:
        raise UserError(_explain_absent(str(path), keys))
    dropped: Counter[str] = Counter()
    train = _read_rows(train_files, keys, dropped)
    if eval_files:
        held_out = _read_rows(eval_files, keys, dropped)
    else:
        train_index, eval_index = train_eval_indices(len(train), seed)
        train, held_out = [train[i] for i in train_index], [train[i] for i in eval_index]
    for reason, count in dropped.items():
        logger.warning("%s: skipped %d rows (%s)", path, count, reason)
    return Source(name, train, held_out, (*train_files, *eval_files), dict(dropped))


def _find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and evaluation files of a folder."""
    train = _matching(folder, TRAIN_PREFIX)
    if not train:
        patterns = ", ".join(f"{TRAIN_PREFIX}*{suffix}" for suffix in FOLDER_SUFFIXES)
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        raise UserError(
            f"--data_path {folder}: no training file. Looked for {patterns} (and, for evaluation, "
            f"{', '.join(prefix + '*' for prefix in EVAL_PREFIXES)} with the same suffixes); the folder holds: "
            f"{found}. Rename the files, or give one file instead of the folder."
        )
    for prefix in EVAL_PREFIXES:
        held_out = _matching(folder, prefix)
        if held_out:
            return train, held_out
    return train, []


def _matching(folder: Path, prefix: str) -> list[Path]:
    """Files of a folder with this prefix, all of one suffix, by name."""
    files = [
        entry
        for entry in sorted(folder.iterdir())
        if entry.is_file() and entry.name.startswith(prefix) and entry.suffix in FOLDER_SUFFIXES
    ]
    if len({file.suffix for file in files}) > 1:
        raise UserError(
            f"--data_path {folder}: {prefix}* exists both as .jsonl and as .parquet ("
            f"{', '.join(file.name for file in files)}); keep one of the two, or give one file instead of the folder."
        )
    return files


def _explain_absent(path: str, keys: DataKeys) -> str:
    """Message for a path that does not exist."""
    wanted = (
        f"a {', '.join(FILE_SUFFIXES)} file, or a folder with {TRAIN_PREFIX}*.jsonl or {TRAIN_PREFIX}*.parquet, with "
        f"the columns {keys.prompt}, {keys.chosen}, {keys.rejected} (or {keys.prompt}, {keys.response}; or "
        f"{keys.messages}; or info, summaries, choice)"
    )
    if HUB_NAME.fullmatch(path) and not path.startswith(".") and Path(path).suffix not in FILE_SUFFIXES:
        return (
            f"--data_path {path}: there is no such folder. If this is the name of a data set on the Hugging Face hub: "
            f"data sets are read from local files. Download it and give {wanted}."
        )
    return f"--data_path {path}: there is no such file or folder. Give {wanted}."


def _read_rows(files: Sequence[Path], keys: DataKeys, dropped: Counter[str]) -> list[Row]:
    """Rows of several files; skipped ones are counted in `dropped`."""
    rows: list[Row] = []
    for file in files:
        before, skipped = len(rows), 0
        for raw, origin in _read_file(file):
            row = parse_row(raw, keys, origin)
            if row is None:
                skipped += 1
            else:
                rows.append(row)
        if len(rows) == before and not skipped:
            raise UserError(f"--data_path: {file} is empty; give a file with at least one row.")
        if skipped:
            dropped[NO_TEXT] += skipped
    if not rows:
        names = ", ".join(map(str, files))
        raise UserError(f"--data_path: no usable row in {names}: every row has {NO_TEXT}; give a file with texts.")
    return rows


def _read_file(file: Path) -> Iterator[tuple[Any, str]]:
    """Parsed rows of one file, each with its origin."""
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
