# SPDX-License-Identifier: Apache-2.0
"""Data files and folders → rows as they are stored. Other kinds of files are not opened, and nothing is executed."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError
from dschat.base.jsonl import json_rows
from dschat.base.lfs import refuse_pointer
from dschat.data.rows import RawSource

if TYPE_CHECKING:
    from datasets import Dataset

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
FOLDER_SUFFIXES = (".jsonl", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
TRAIN_PREFIX = "train"
EVAL_PREFIXES = ("valid", "eval", "test")  # the first that has files is used; "valid" includes "validation"
# Subfolders with the files of a data set that was downloaded from the hub; several hold a part each.
DOWNLOAD_FOLDERS: tuple[tuple[str, ...], ...] = (
    *(("comparisons",), ("default",), ("data",), ("all",), ("main",)),
    ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"),
)
DATASET_DICT = "dataset_dict.json"  # `save_to_disk` writes it for several splits
DATASET = "state.json"  # for a single data set
LARGEST_CSV_ROW = 1 << 26  # bytes
# Files of the hub that tell their split: by their own name, data/train_sft-00000-of-00002.parquet,
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5}).*")
# or on the branch of converted files by that of their folder, default/train_sft/0000.parquet.
CONVERTED_FILE = re.compile(r"\d{4}\.parquet")


def open_files(root: Path) -> RawSource:
    """A file or folder; rows are read one at a time when they are iterated over.

    Raises:
        UserError: not a data file, or see `find_files`; while reading: see `read_file`.
    """
    if root.is_dir():
        name = root.resolve().name
        train_files, eval_files = find_files(root)
    elif suffix_of(root) in FILE_SUFFIXES:
        name = root.name.removesuffix(suffix_of(root))
        train_files, eval_files = [root], []
    else:
        raise UserError(f"--data_path {root}: not a data file; give a file that ends in {', '.join(FILE_SUFFIXES)}.")
    all_files = (*train_files, *eval_files)
    for file in all_files:
        refuse_pointer(file, "--data_path")
    train_rows = chain.from_iterable(map(read_file, train_files)) if train_files else None
    eval_rows = chain.from_iterable(map(read_file, eval_files)) if eval_files else None
    return RawSource(name, train_rows, eval_rows, all_files)


def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and evaluation files of a folder, which may hold one of the two kinds alone.

    Files are named train*, valid*, eval* or test*, or are in subfolders of such names; in `folder` itself or, as
    `hf download` leaves them, in one of its DOWNLOAD_FOLDERS.

    Raises:
        UserError: no file of either kind, files of two suffixes, or of several splits of a data set of the hub.
    """
    for parts in ((".",), *DOWNLOAD_FOLDERS):
        train_files: list[Path] = []
        eval_files: list[Path] = []
        for part in parts:
            train_files += _matching_files(folder / part, TRAIN_PREFIX)
            all_eval_files = (_matching_files(folder / part, prefix) for prefix in EVAL_PREFIXES)
            eval_files += next(filter(None, all_eval_files), [])
        if train_files or eval_files:
            _require_one_split(folder, train_files)
            _require_one_split(folder, eval_files)
            return train_files, eval_files
    train_patterns = ", ".join(f"{TRAIN_PREFIX}*{suffix}" for suffix in FOLDER_SUFFIXES)
    eval_patterns = ", ".join(f"{prefix}*" for prefix in EVAL_PREFIXES)
    names = sorted(entry.name for entry in folder.iterdir())
    content = ", ".join(names[:10]) or "nothing"
    raise UserError(
        f"--data_path {folder}: no data file. Looked for {train_patterns} (and, for evaluation, {eval_patterns} "
        f"with the same suffixes); the folder holds: {content}. Rename the files, or give one file instead of the "
        "folder."
    )


def _require_one_split(folder: Path, files: list[Path]) -> None:
    """Raises UserError if the files, whose names on the hub tell it, are of several splits or not all of one."""
    splits = set()
    shards: dict[Path, list[re.Match[str]]] = {}  # of each set of files, by its path without numbers
    for file in files:
        shard = SHARD.fullmatch(file.name)
        if shard is not None:
            splits.add(shard[1])
            shards.setdefault(file.parent / shard[1], []).append(shard)
        elif CONVERTED_FILE.fullmatch(file.name):
            splits.add(file.parent.name)
    splits = {name for name in splits if name.startswith((TRAIN_PREFIX, *EVAL_PREFIXES))}
    if len(splits) > 1:
        raise UserError(
            f"--data_path {folder}: it holds files of the splits {', '.join(sorted(splits))}; give a folder that "
            "holds the files of one of them."
        )
    for name, of_name in shards.items():
        numbers = sorted(int(shard[2]) for shard in of_name)
        counts = {int(shard[3]) for shard in of_name}
        if numbers != list(range(max(counts))) or len(counts) > 1:
            raise UserError(
                f"--data_path {name}-*: {len(numbers)} files, and not number 0 to {max(counts) - 1} of one edition;"
                " download the rest, or give one of the files."
            )


def suffix_of(file: Path) -> str:
    """The suffix of a file's name, with both parts if the file is compressed: ".csv", ".csv.gz"."""
    if file.suffix == ".gz":
        return "".join(file.suffixes[-2:])
    return file.suffix


def used_splits(names: Iterable[object]) -> tuple[str | None, str | None, list[str]]:
    """Which splits of a data set are read.

    Returns:
        The names of the training split and of the evaluation split, each the first of its kind; None if there is
        none. Then the names of the other splits of the two kinds. The evaluation splits are those that match the
        first possible prefix of EVAL_PREFIXES.
    """
    splits = [str(name) for name in names]
    train_splits = _with_prefix(splits, TRAIN_PREFIX)
    all_eval_splits = (_with_prefix(splits, prefix) for prefix in EVAL_PREFIXES)
    eval_splits: list[str] = next(filter(None, all_eval_splits), [])
    unread = train_splits[1:] + eval_splits[1:]
    return next(iter(train_splits), None), next(iter(eval_splits), None), unread


def _with_prefix(names: list[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def note_of_unread(splits: Sequence[str], unread: Sequence[str]) -> str:
    """That not all splits are read, for a warning: the names of those that are, and of the others."""
    return (
        f"its splits {', '.join(splits)} are read, and not {', '.join(unread)}. To read one of these, give its file "
        "or a folder that holds it alone."
    )


def _matching_files(folder: Path, prefix: str) -> list[Path]:
    """Files of a folder with a prefix, or else all files in subfolders with it; sorted, all of one suffix."""
    for pattern in (f"{prefix}*", f"{prefix}*/*"):
        files = []
        for file in sorted(folder.glob(pattern)):
            if file.is_file() and suffix_of(file) in FOLDER_SUFFIXES:
                files.append(file)
        suffixes = sorted({suffix_of(file) for file in files})
        if len(suffixes) > 1:
            raise UserError(
                f"--data_path {folder}: {prefix}* exists both as {' and as '.join(suffixes)} ("
                f"{', '.join(file.name for file in files)}); keep one of the two, or give one file instead of the "
                "folder."
            )
        if files:
            return files
    return []


def read_file(file: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each as its origin and its columns.

    Raises:
        UserError: the file is empty, or the file or a row cannot be read; the message names the file and, if known,
            the line.
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
    if suffix in (".parquet", ".csv"):
        yield from _column_rows(file, suffix)
    else:
        yield from json_rows(file)


def _column_rows(file: Path, suffix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet or CSV file, each with its number. CSV cells are text; an empty one is absent (None)."""
    import pyarrow
    from pyarrow import csv, parquet

    try:
        if suffix == ".parquet":
            batches = parquet.ParquetFile(file).iter_batches()
        else:
            batches = csv.open_csv(
                file,
                csv.ReadOptions(block_size=LARGEST_CSV_ROW),
                csv.ParseOptions(newlines_in_values=True),
                csv.ConvertOptions(
                    default_column_type=pyarrow.large_string(), null_values=[""], strings_can_be_null=True
                ),
            )
            _check_columns(file, [name.strip() for name in batches.schema.names])
        number = 0
        for batch in batches:
            columns = [name.strip() for name in batch.schema.names]
            for row in batch.rename_columns(columns).to_pylist():
                number += 1
                yield f"{file} row {number}", row
    except (pyarrow.ArrowException, ValueError) as error:
        kind = suffix.removeprefix(".")
        raise UserError(
            f"--data_path: {file} is not a readable {kind} file ({error}); correct or replace it."
        ) from error


def _check_columns(file: Path, names: list[str]) -> None:
    """Raises UserError unless the first line of a CSV file names the columns, separated by commas."""
    if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
        raise UserError(f"{file}: the first line names one column, {names[0]!r}; separate columns by commas.")
    if len(set(names)) < len(names):
        raise UserError(
            f"{file}: the first line must name the columns, each by a name of its own, not "
            f"{', '.join(map(repr, names))}; correct it."
        )


def open_local(root: Path) -> RawSource:
    """A file or folder of this machine; see `open_saved` and `open_files`."""
    is_saved = (root / DATASET_DICT).is_file() or (root / DATASET).is_file()
    return open_saved(root) if is_saved else open_files(root)


def open_saved(folder: Path) -> RawSource:
    """A folder written by `save_to_disk`: its `used_splits`, or all rows of a single data set.

    Raises:
        UserError: the folder is damaged, or holds no split to read; also while rows are read.
    """
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library lets through whatever the libraries below it raise
        raise _unreadable(folder, error) from error
    if isinstance(saved, datasets.Dataset):
        arrow_files = tuple(sorted(folder.glob("*.arrow")))
        return RawSource(folder.resolve().name, _saved_rows(saved, folder), None, arrow_files)
    train_name, eval_name, unread = used_splits(saved)
    rows: dict[str | None, Iterator[tuple[str, Any]]] = {}
    files: list[Path] = []
    for name in filter(None, (train_name, eval_name)):
        rows[name] = _saved_rows(saved[name], folder / name)
        files += sorted((folder / name).glob("*.arrow"))
    if not rows:
        raise UserError(
            f"--data_path {folder}: no split that begins with {TRAIN_PREFIX} (or, for evaluation, with "
            f"{', '.join(EVAL_PREFIXES)}), only {', '.join(map(str, saved))}; give the folder of one of them."
        )
    return RawSource(
        name=folder.resolve().name,
        train=rows.get(train_name),
        eval=rows.get(eval_name),
        files=tuple(files),
        splits=tuple(filter(None, rows)),
        unread=tuple(unread),
    )


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
    """The type and first line of an error; of its cause, if it only says where the cause was raised."""
    if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = []
    for line in str(error).splitlines():
        if line.strip():
            lines.append(line.strip())
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def os_error_behind(error: BaseException) -> OSError | None:
    """The first OSError among an exception and its causes; None if there is none.

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
