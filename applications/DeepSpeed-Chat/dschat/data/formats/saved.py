# SPDX-License-Identifier: Apache-2.0
"""Folders that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` of the `datasets` library wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.data.formats.files import EVAL_PREFIXES, TRAIN_PREFIX, open_files, split_with
from dschat.data.formats.rows import RawSource
from dschat.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS, ONE = "dataset_dict.json", "state.json"  # what tells the two kinds of folder


def open_local(root: Path) -> RawSource:
    """A file or folder of this machine; see `open_saved` and `dschat.data.formats.files.open_files`."""
    is_saved = (root / SPLITS).is_file() or (root / ONE).is_file()
    return open_saved(root) if is_saved else open_files(root)


def open_saved(folder: Path) -> RawSource:
    """The split that begins with train, and the first that begins with valid, eval or test; or the one data set.

    Raises:
        UserError: the folder is damaged, or holds no training split; also while rows are read.
    """
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library lets through whatever the libraries below it raise
        raise _unreadable(folder, error) from error
    name = folder.resolve().name
    if isinstance(saved, datasets.Dataset):
        return RawSource(name, _rows(saved, folder), None, _files(folder))
    train = split_with(map(str, saved), [TRAIN_PREFIX])
    if train is None:
        raise UserError(
            f"--data_path {folder}: no split that begins with {TRAIN_PREFIX!r}, only {', '.join(map(str, saved))}; "
            "give the folder of one of them."
        )
    held_out = split_with(map(str, saved), EVAL_PREFIXES)
    eval_rows = _rows(saved[held_out], folder / held_out) if held_out else None
    files = _files(folder / train) + (_files(folder / held_out) if held_out else ())
    return RawSource(name, _rows(saved[train], folder / train), eval_rows, files)


def _rows(dataset: "Dataset", folder: Path) -> Iterator[tuple[str, Any]]:
    try:
        for number, raw in enumerate(dataset.with_format(None), start=1):
            yield f"{folder} row {number}", raw
    except (OSError, ValueError) as error:  # Arrow's errors are of these kinds
        raise _unreadable(folder, error) from error


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*.arrow")))


def _unreadable(folder: Path, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"--data_path {folder}: a folder of save_to_disk that cannot be opened ({type(error).__name__}: {reason}); "
        "save it again, with the version of datasets that is installed here or an older one."
    )
