# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are whole or not there: written beside their place, flushed to the disk, then renamed.

Nothing else renames. What a kill leaves the next start puts right: `recover`, `recover_folder`, `Backup.restore`.
"""

import errno
import glob
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dschat.base.errors import UserError

LAST = "config.json"  # what makes a folder a model's comes last
WRITING = ".writing"  # ends the name of what is being written
REPLACED = ".replaced-by-a-newer-one"  # ends the name of a folder that makes way, for as long as it takes
BACKUP, DELETED = ".given-up", ".deleted"  # folders of a `Backup`, and while it is being deleted
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of a disk that takes no more
ABANDONED = 24 * 3600.0  # seconds after which what is being written belongs to a process that was killed


@contextmanager
def writing(file: Path, shared: bool = False) -> Iterator[Path]:
    """A path to write a file to, which is in its place afterwards; until then, and if that fails, nothing changes.

    Its folder is made if need be; a link stays, pipes and devices are written as they are. With `shared`, several
    processes may write it at the same time: the last one's stays. Raises OSError.
    """
    file = file.resolve()
    if file.exists() and not file.is_file():
        yield file
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(file, shared)
    try:
        yield beside
        flush(beside)
        os.replace(beside, file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_file(file: Path, content: str | bytes) -> None:
    """Writes bytes, or text in UTF-8 with a ? for each lone surrogate, as `writing` does."""
    with writing(file) as beside:
        beside.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Inside, an OSError is a UserError: `what`, a file or a flag with its value, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: cannot be written: {error}") from error


@contextmanager
def writing_folder(folder: Path, shared: bool = False) -> Iterator[Path]:
    """A new folder to write into, which is in its place afterwards; one that was there stays until then.

    See `recover_folder`. `shared` as of `writing`, but the first one's stays. Raises OSError.
    """
    with _new_folder(_beside(folder, shared)) as beside:
        yield beside
        flush(*beside.rglob("*"), beside)
        try:
            (os.replace if shared else put)(beside, folder)
        except OSError:
            if not (shared and folder.is_dir()):  # else another process was first
                raise


@contextmanager
def writing_into(
    place: Path,
    beside: Path,
    before_moving: Callable[[], None],
) -> Iterator[Path]:
    """A new folder to write into; afterwards its files and folders are in ``place``, among what is there.

    A file or folder that was there stays as it is until its successor is whole. If writing fails, nothing is replaced.
    See `recover`. `before_moving` is called when everything is written to ``beside``, which is on the same disk.
    """
    recover(place)
    with _new_folder(beside):
        yield beside
        flush(*beside.rglob("*"), beside)
        before_moving()
        place.mkdir(parents=True, exist_ok=True)
        move_all(beside, place)
        flush(place)


def put(entry: Path, target: Path) -> None:
    """Gives a file or folder a name on its disk; a file of that name is replaced, a folder first makes way."""
    if not target.is_dir():
        os.replace(entry, target)
        return
    old = replaced_by(target)
    remove(old)
    try:
        os.replace(target, old)
        os.replace(entry, target)
    except BaseException:  # also Ctrl-C
        _bring_back(old, target)
        raise
    remove(old)


def move_all(folder: Path, place: Path) -> None:
    """Moves what a folder holds into another one, where it replaces what is called alike, and removes the folder."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == LAST):
        put(entry, place / entry.name)
    folder.rmdir()


def recover(place: Path) -> None:
    """Puts right what a kill left in ``place``: a folder that made way comes back where it has no successor."""
    for old in place.glob(f".*{REPLACED}"):
        _bring_back(old, place / old.name[1:].removesuffix(REPLACED))


def replaced_by(folder: Path) -> Path:
    """Where a folder lies while another one takes its place."""
    return folder.with_name(f".{folder.name}{REPLACED}")


def recover_folder(folder: Path) -> None:
    """Puts one folder right, which nobody may be writing now: after a kill it comes back where it has no successor."""
    _bring_back(replaced_by(folder), folder)


class Backup:
    """Files and folders of a place that make way for several new ones: put aside until those stand."""

    def __init__(self, place: Path) -> None:
        self._place, self._folder = place, place / BACKUP

    def put_aside(self, entries: Iterable[Path]) -> None:
        """Moves some of what the place holds out of the way."""
        self._folder.mkdir(exist_ok=True)
        for entry in entries:
            os.replace(entry, self._folder / entry.name)

    def restore(self) -> None:
        """After a kill: what was put aside comes back, unless it was being deleted."""
        remove(self._place / DELETED)
        recover(self._place)
        if self._folder.exists():
            move_all(self._folder, self._place)

    def drop(self) -> None:
        """Deletes what was put aside, if anything was."""
        if self._folder.exists():
            os.replace(self._folder, self._place / DELETED)
            remove(self._place / DELETED)


def remove(folder: Path) -> None:
    """Removes a folder with everything in it, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def missing_folders(place: Path) -> list[Path]:
    """A folder and those of its parents that do not exist, the innermost first."""
    return [folder for folder in (place, *place.parents) if not os.path.exists(folder)]


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes folders, in this order, as far as they are empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Removes files and folders that killed processes left unfinished, as a glob pattern names them.

    They count as left when nothing in them was written for a day: a folder's own time stays as it is while a file in
    it grows.
    """
    for left in folder.glob(pattern):
        with suppress(OSError):  # another process removed it
            if time.time() - last_written(left) > ABANDONED:
                remove(left) if left.is_dir() else left.unlink()


def last_written(entry: Path) -> float:
    """When a file, or anything in a folder, was written last, in seconds since the epoch. Raises OSError."""
    return max(path.lstat().st_mtime for path in (entry, *entry.rglob("*")))


def flush(*paths: Path) -> None:
    """Waits until files, and folders' lists of names, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _beside(path: Path, shared: bool) -> Path:
    """Where a file or folder is written; of its own for each writer where there are several."""
    if not shared:
        return path.with_name(f".{path.name}{WRITING}")
    remove_abandoned(path.parent, f".{glob.escape(path.name)}.*{WRITING}")
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{WRITING}")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder, in the place of what a killed process left; gone afterwards unless it was renamed."""
    remove(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        remove(folder)


def _bring_back(old: Path, target: Path) -> None:
    """Ends a replacement: the folder that made way comes back, or goes where its successor stands."""
    if target.exists():
        remove(old)
    elif old.exists():
        os.replace(old, target)
