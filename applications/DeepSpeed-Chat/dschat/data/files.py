# SPDX-License-Identifier: Apache-2.0
"""Data files and folders → rows as they stand there. Nothing but these kinds is opened, and nothing executed."""

import codecs
import csv
import io
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.base.jsonl import json_lines, opened, parse_json
from dschat.data.rows import RawSource

if TYPE_CHECKING:
    from datasets import Dataset

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
FOLDER_SUFFIXES = (".jsonl", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
TRAIN_PREFIX = "train"
EVAL_PREFIXES = ("valid", "eval", "test")  # the first that has files is used; "valid" includes "validation"
# Where the files of a data set downloaded from the hub lie, below the folder that it was downloaded to.
DOWNLOAD_FOLDERS = ("comparisons", "default", "data", "all")
SPLITS, ONE = "dataset_dict.json", "state.json"  # what tells the two kinds of folder


def open_files(root: Path) -> RawSource:
    """A file or folder; files are read one row at a time, when their rows are asked for.

    Raises:
        UserError: not a data file, or see `find_files`; while reading: see `read_file`.
    """
    if root.is_dir():
        name, (train, held_out) = root.resolve().name, find_files(root)
    elif suffix_of(root) in FILE_SUFFIXES:
        name, train, held_out = root.name.removesuffix(suffix_of(root)), [root], []
    else:
        raise UserError(f"--data_path {root}: not a data file; give a file that ends in {', '.join(FILE_SUFFIXES)}.")
    eval_rows = chain.from_iterable(map(read_file, held_out)) if held_out else None
    return RawSource(name, chain.from_iterable(map(read_file, train)), eval_rows, (*train, *held_out))


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and evaluation files of a folder.

    They are called train*, valid*, eval* or test*, or lie in folders of those names; either in `folder` itself or, as
    `hf download` leaves them, in one of DOWNLOAD_FOLDERS below it.

    Raises:
        UserError: no training file, or files of two suffixes.
    """
    for place in (folder, *(folder / name for name in DOWNLOAD_FOLDERS)):
        train = _matching(place, TRAIN_PREFIX)
        if train:
            held_out = (_matching(place, prefix) for prefix in EVAL_PREFIXES)
            return train, next(filter(None, held_out), [])
    patterns = ", ".join(f"{TRAIN_PREFIX}*{suffix}" for suffix in FOLDER_SUFFIXES)
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
    raise UserError(
        f"--data_path {folder}: no training file. Looked for {patterns} (and, for evaluation, "
        f"{', '.join(prefix + '*' for prefix in EVAL_PREFIXES)} with the same suffixes); the folder holds: "
        f"{found}. Rename the files, or give one file instead of the folder."
    )


def suffix_of(file: Path) -> str:
    """What a file's name ends in, with both parts where it is packed: ".csv", ".csv.gz"."""
    return "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix


def used_splits(names: Iterable[object]) -> list[str]:
    """The split to train on and, if there is one, that to evaluate on; none of them where there are no training rows.

    An earlier one of EVAL_PREFIXES comes first.
    """
    known = list(map(str, names))
    starts = [[name for name in known if name.startswith(prefix)] for prefix in (TRAIN_PREFIX, *EVAL_PREFIXES)]
    return starts[0][:1] + [name for found in starts[1:] for name in found][:1] if starts[0] else []


def _matching(folder: Path, prefix: str) -> list[Path]:
    """Files of a folder with this prefix, or else those in its sub-folders with it; all of one suffix, by name."""
    for pattern in (f"{prefix}*", f"{prefix}*/*"):
        files = sorted(file for file in folder.glob(pattern) if file.is_file() and suffix_of(file) in FOLDER_SUFFIXES)
        if len(suffixes := sorted({suffix_of(file) for file in files})) > 1:
            raise UserError(
                f"--data_path {folder}: {prefix}* exists both as {' and as '.join(suffixes)} ("
                f"{', '.join(file.name for file in files)}); keep one of the two, or give one file instead of the "
                "folder."
            )
        if files:
            return files
    return []


def read_file(file: Path) -> Iterator[tuple[str, Any]]:
    """What the rows of a file hold, each with its origin.

    Raises:
        UserError: the file is empty, or it or a row cannot be read; the message names the file and, where it can, the
            line.
    """
    is_empty = True
    try:
        for row in _rows(file):
            is_empty = False
            yield row
    except OSError as error:
        raise UserError(f"--data_path: cannot read {file} ({error}); check the file and its permissions.") from error
    if is_empty:
        raise UserError(f"--data_path: {file} is empty; give a file with at least one row.")


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    suffix = suffix_of(file).removesuffix(".gz")
    if suffix == ".parquet":
        yield from _parquet_rows(file)
    elif suffix == ".csv":
        yield from csv_rows(file)
    elif suffix == ".json" and _is_array(file):
        with opened(file) as stream:
            content = stream.read()
        for number, raw in enumerate(parse_json(content, str(file)), start=1):
            yield f"{file} row {number}", raw
    else:
        yield from json_lines(file)


def _is_array(file: Path) -> bool:
    """Whether a .json file holds a list, by its first character; otherwise it holds JSON Lines."""
    with opened(file) as lines:
        first = next(filter(None, (line.removeprefix(codecs.BOM_UTF8).strip() for line in lines)), b"")
        return first.startswith(b"[")


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            rows = chain.from_iterable(batch.to_pylist() for batch in opened.iter_batches())
            for number, raw in enumerate(rows, start=1):
                yield f"{file} row {number}", raw
    except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"--data_path: {file} is not a readable parquet file ({error}); replace it.") from error


def csv_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the rows of a file hold, each with its place "file:line", the line where it begins.

    Cells are text; an empty one counts as absent (None). Quoted cells may hold commas, line ends and doubled quotes.

    Raises:
        OSError: the file cannot be read.
        UserError: no UTF-8, a broken quote, a column without a name or with another's, or a row of another length.
    """
    csv.field_size_limit(sys.maxsize)
    with opened(file) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, strict=True)
        line = 0
        columns: list[str] | None = None
        try:
            for cells in reader:
                origin, line = f"{file}:{line + 1}", reader.line_num
                if not cells:
                    continue
                if columns is None:
                    columns = _columns(cells, origin)
                elif len(cells) != len(columns):
                    raise UserError(
                        f"{origin}: {len(cells)} cells where the first line names {len(columns)} columns; put texts "
                        "that hold commas, quotes or line ends between double quotes, and double the quotes in them."
                    )
                else:
                    yield origin, {name: cell or None for name, cell in zip(columns, cells, strict=True)}
        except csv.Error as error:
            raise UserError(
                f"{file}:{line + 1}: not readable as CSV ({error}); correct the quotes of that row."
            ) from error
        except UnicodeDecodeError as error:
            with opened(file) as again:  # the reader decodes many lines at a time
                bad = next(n for n, one in enumerate(again, start=1) if one.decode("utf-8", "ignore").encode() != one)
            raise UserError(
                f"{file}:{bad}: not readable as UTF-8 ({error.reason}); save the file as UTF-8."
            ) from error


def _columns(cells: list[str], origin: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "" in names or len(set(names)) < len(names):
        raise UserError(
            f"{origin}: the first line must name the columns, each by a name of its own, not "
            f"{', '.join(map(repr, names))}; add or correct it."
        )
    return names


def open_local(root: Path) -> RawSource:
    """A file or folder of this machine; see `open_saved` and `open_files`."""
    is_saved = (root / SPLITS).is_file() or (root / ONE).is_file()
    return open_saved(root) if is_saved else open_files(root)


def open_saved(folder: Path) -> RawSource:
    """A folder of `save_to_disk`: its `used_splits`, or all rows where it holds one data set.

    Raises:
        UserError: the folder is damaged, or holds no training split; also while rows are read.
    """
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library lets through whatever the libraries below it raise
        raise _unreadable(folder, error) from error
    parts = {TRAIN_PREFIX: saved} if isinstance(saved, datasets.Dataset) else dict(saved)
    used = used_splits(parts)
    if not used:
        raise UserError(
            f"--data_path {folder}: no split that begins with {TRAIN_PREFIX!r}, only {', '.join(map(str, parts))}; "
            "give the folder of one of them."
        )
    places = [folder] if isinstance(saved, datasets.Dataset) else [folder / name for name in used]
    rows = [_saved_rows(parts[name], place) for name, place in zip(used, places, strict=True)]
    files = tuple(file for place in places for file in sorted(place.glob("*.arrow")))
    return RawSource(folder.resolve().name, rows[0], rows[1] if len(rows) > 1 else None, files)


def _saved_rows(dataset: "Dataset", folder: Path) -> Iterator[tuple[str, Any]]:
    try:
        for number, raw in enumerate(dataset.with_format(None), start=1):
            yield f"{folder} row {number}", raw
    except (OSError, ValueError) as error:  # Arrow's errors are of these kinds
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> UserError:
    return UserError(
        f"--data_path {folder}: a folder of save_to_disk that cannot be opened ({reason_of(error)}); save it again, "
        "with the version of datasets that is installed here or an older one."
    )


def reason_of(error: Exception) -> str:
    """First line of what went wrong, with its kind; what lies below an error that only says where it happened."""
    if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def os_error_behind(error: BaseException) -> OSError | None:
    """The first OSError among an exception and the ones that caused it; None if there is none.

    `datasets` reports a full disk as a DatasetGenerationError, with the operating system's error as its cause.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, OSError):
            return current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return None
