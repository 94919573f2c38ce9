# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are complete or not there: written under another name, flushed to the disk, then renamed.

No other module renames files. After a kill the next start cleans up: `recover`, `recover_folder`.
"""

import errno
import glob
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dschat.base.errors import UserError

LAST = "config.json"  # moved last: a folder counts as a model once it has this file
WRITING = ".writing"  # suffix of a file or folder that is being written
REPLACED = ".replaced-by-a-newer-one"  # suffix of a folder that was put aside while its successor is moved
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of a disk that cannot hold more
ABANDONED = 24 * 3600.0  # seconds without a write after which the writer counts as killed


@contextmanager
def writing(file: Path, shared: bool = False) -> Iterator[Path]:
    """Yields a path to write a file to, which replaces `file` after the block; if the block fails, nothing changes.

    Creates the parent folder. Follows a symbolic link, which stays. Writes pipes and devices directly. With `shared`,
    several processes may write the file at the same time, and the last writer wins. Raises OSError.
    """
    file = file.resolve()
    if file.exists() and not file.is_file():
        yield file
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_path(file, shared)
    try:
        yield temporary
        flush(temporary)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def writing_once(file: Path) -> Iterator[Path]:
    """Yields a path to write a file to, which becomes `file` after the block unless another process was first.

    Its folder is made if need be. On a disk without hard links the last one's stays. Raises OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_path(file, shared=True)
    try:
        yield temporary
        flush(temporary)
        try:
            os.link(temporary, file)
        except FileExistsError:
            pass
        except OSError:
            os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(file: Path, content: str | bytes) -> None:
    """Writes bytes, or text in UTF-8 with a ? for each lone surrogate; see `writing`."""
    if isinstance(content, str):
        content = content.encode("utf-8", "replace")
    with writing(file) as temporary:
        temporary.write_bytes(content)


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Turns an OSError into a UserError: `what`, a file or a flag with its value, cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: cannot be written: {error}") from error


@contextmanager
def writing_folder(folder: Path, shared: bool = False) -> Iterator[Path]:
    """Yields a new folder to write to, which replaces `folder` after the block; the old one stays until then.

    Follows a symbolic link, which stays. With `shared`, several processes may write the folder at the same time, and
    the first writer wins. After a kill call `recover_folder`. Raises OSError.
    """
    folder = _linked(folder)
    with _new_folder(_temporary_path(folder, shared)) as temporary:
        yield temporary
        flush(*temporary.rglob("*"), temporary)
        if not shared:
            put(temporary, folder)
            return
        try:
            os.replace(temporary, folder)
        except OSError:
            another_was_first = folder.is_dir()
            if not another_was_first:
                raise


@contextmanager
def writing_into(place: Path, temporary: Path, before_moving: Callable[[], None]) -> Iterator[Path]:
    """Yields a new folder to write to; after the block its files and folders are moved to ``place``.

    Existing files and folders stay until their successors are complete; if writing fails, nothing is replaced. After a
    kill call `recover`. `before_moving` is called when everything is in ``temporary``, which is on the same disk.
    """
    recover(place)
    with _new_folder(temporary):
        yield temporary
        flush(*temporary.rglob("*"), temporary)
        before_moving()
        place.mkdir(parents=True, exist_ok=True)
        move_all(temporary, place)
        flush(place)


def put(entry: Path, target: Path) -> None:
    """Renames a file or folder; an existing file is replaced, an existing folder is first put aside.

    A symbolic link at the target stays: what it names is replaced, on its own disk.
    """
    target = _linked(target)
    target.parent.mkdir(parents=True, exist_ok=True)  # a link may name a folder that is gone
    entry = _beside(entry, target)
    if not target.is_dir():
        if entry.is_dir() and os.path.lexists(target):
            raise FileExistsError(f"{target} is in the way and is no folder: move it elsewhere")
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
    """Moves the content of a folder to another one, replacing entries of the same names; removes the folder."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == LAST):
        put(entry, place / entry.name)
    folder.rmdir()


def recover(place: Path) -> None:
    """Cleans up ``place`` after a kill: a folder that was put aside comes back if it has no successor."""
    for old in place.glob(f".*{REPLACED}"):
        _bring_back(old, place / old.name[1:].removesuffix(REPLACED))
    for entry in place.glob("*"):
        if entry.is_symlink():
            recover_folder(entry)


def replaced_by(folder: Path) -> Path:
    """The path of a folder that was put aside while its successor is moved."""
    return folder.with_name(f".{folder.name}{REPLACED}")


def recover_folder(folder: Path) -> None:
    """Brings back a folder that was put aside before a kill, if it has no successor; nobody may be writing it now."""
    folder = _linked(folder)
    _bring_back(replaced_by(folder), folder)


def move_aside(entries: Sequence[Path], place: Path) -> Path:
    """Moves files and folders of `place`, in this order, into a new folder `earlier-N` there, and returns it."""
    number = 1
    while (place / f"earlier-{number}").exists():
        number += 1
    aside = place / f"earlier-{number}"
    aside.mkdir()
    for entry in entries:
        os.replace(entry, aside / entry.name)
    return aside


def remove(folder: Path) -> None:
    """Removes a folder and its content, as far as possible."""
    shutil.rmtree(folder, ignore_errors=True)


def missing_folders(place: Path) -> list[Path]:
    """A folder and those of its parents that do not exist, the innermost first."""
    missing: list[Path] = []
    for folder in (place, *place.parents):
        if not os.path.exists(folder):
            missing.append(folder)
    return missing


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes the folders that are empty, in this order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Removes unfinished files and folders of killed processes that match a glob pattern.

    An entry counts as abandoned if nothing in it was written for a day: a folder's own time does not change while a
    file in it grows.
    """
    for entry in folder.glob(pattern):
        with suppress(OSError):  # another process removed it
            if time.time() - last_written(entry) <= ABANDONED:
                continue
            if entry.is_dir():
                remove(entry)
            else:
                entry.unlink()


def last_written(entry: Path) -> float:
    """Time of the last write to a file, or to anything in a folder, in seconds since the epoch. Raises OSError."""
    return max(path.lstat().st_mtime for path in (entry, *entry.rglob("*")))


def flush(*paths: Path) -> None:
    """Waits until files, and folders' lists of names, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _linked(path: Path) -> Path:
    """The path that a symbolic link names; other paths as they are."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _beside(entry: Path, target: Path) -> Path:
    """A file or folder that can be renamed to the target: the entry, or a copy if the target is on another disk."""
    if entry.lstat().st_dev == target.parent.stat().st_dev:
        return entry
    copy = _temporary_path(target, shared=False)
    if entry.is_dir():
        remove(copy)
        shutil.copytree(entry, copy)
        flush(*copy.rglob("*"), copy)
        remove(entry)
    else:
        shutil.copy2(entry, copy)
        flush(copy)
        entry.unlink()
    return copy


def _temporary_path(path: Path, shared: bool) -> Path:
    """The path under which a file or folder is written; different for each writer if there are several."""
    if not shared:
        return path.with_name(f".{path.name}{WRITING}")
    remove_abandoned(path.parent, f".{glob.escape(path.name)}.*{WRITING}")
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{WRITING}")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder, which is removed after the block unless it was renamed."""
    remove(folder)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        remove(folder)


def _bring_back(old: Path, target: Path) -> None:
    """Ends a replacement: the folder that was put aside is removed if its successor exists, else it comes back."""
    if target.exists():
        remove(old)
    elif old.exists():
        os.replace(old, target)
