# SPDX-License-Identifier: Apache-2.0
"""A lock on a folder or file that several processes might write."""

import fcntl
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from dschat.base.atomic import missing_folders, remove_empty
from dschat.base.errors import UserError

TRIES = 1500  # attempts while a holder is waited for, or while its file is being created or removed
PAUSE = 0.02  # seconds between two attempts


class Lock:
    """An exclusive lock, held until `close` or the end of this process.

    The lock is an flock on a file that contains the holder's name. The kernel releases an flock when its process ends,
    and network file systems enforce it between machines. (A POSIX lock would be lost when this process closes another
    descriptor of the same file.) Child processes never hold the lock: a fork closes its copy of the descriptor, and
    started programs do not inherit it.

    A killed process leaves its file behind; the next process removes it. On a disk without flock, the lock counts as
    held as long as the file exists. `close` removes the file, and also its new parent folders if they are empty.
    """

    def __init__(self, file: Path, what: str, waits: bool = False) -> None:
        """Acquires the lock, and creates its file.

        Args:
            file: the lock file.
            what: a flag and its value, for messages.
            waits: wait up to 30 s until another process releases the lock. Otherwise wait only while the holder's name
                is not known yet.

        Raises:
            UserError: another process holds the lock, or the file cannot be made.
        """
        self._file = file
        self._what = what
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        self._owner = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
        self._new_folders = missing_folders(file.parent)
        try:
            for _ in range(TRIES):
                file.parent.mkdir(parents=True, exist_ok=True)  # another process may just have removed it again
                holder = self._try_once()
                if holder is None or (holder and not waits):
                    break
                time.sleep(PAUSE)
        except OSError as error:
            self._close_descriptor()
            remove_empty(self._new_folders)
            raise UserError(f"{what}: cannot be written: {error}") from error
        if holder is not None:
            remedy = "Wait for its end, stop it, or write elsewhere."
            raise UserError(f"{what}: another process is writing it: {holder or 'unknown'}. {remedy}")

    def check(self) -> None:
        """Raises UserError if the lock is lost: its file was removed, or names another process."""
        if not self.is_held():
            holder = self._holder()
            raise UserError(
                f"{self._what}: this run has lost its lock {self._file} (now held by {holder})."
                " It stops, because another process may be writing here."
            )

    def is_held(self) -> bool:
        """Whether the file still names this process."""
        return self._holder() == self._owner

    def _holder(self) -> str:
        return self._file.read_text(encoding="utf-8") if self._file.exists() else "nobody"

    def close(self) -> None:
        """Releases the lock; does nothing in a fork, which does not hold it."""
        with suppress(OSError):  # the disk is gone; the kernel releases the lock all the same
            if self in _HELD and self._is_in_place():
                self._file.unlink()
                remove_empty(self._new_folders)
        self._close_descriptor()

    def _try_once(self) -> str | None:
        """Tries once to get the lock.

        Returns:
            None if this process holds the lock now, otherwise the name of the holder. An empty name means that the
            holder is not known: try again.
        """
        is_new = not self._file.exists()
        flags = os.O_RDWR
        if is_new:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            self._descriptor = os.open(self._file, flags, 0o666)
        except (FileExistsError, FileNotFoundError):
            return ""  # another process has just created or removed the file
        _HELD.add(self)

        is_locked_elsewhere = False
        has_flock = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            is_locked_elsewhere = True
        except OSError:
            has_flock = False

        holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace")
        if not self._is_in_place():
            holder = ""  # the file was removed after it was opened
        elif not is_locked_elsewhere:
            if not holder and (is_new or has_flock):
                os.pwrite(self._descriptor, self._owner.encode(), 0)
                return None
            if has_flock:  # nobody locks the file: its holder was killed
                self._file.unlink()
                holder = ""
        self._close_descriptor()

        if holder and not has_flock:
            holder += f" (a disk without locks: if that process is gone, remove {self._file})"
        return holder

    def _is_in_place(self) -> bool:
        """Whether the path still leads to the file that was opened."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False

    def _close_descriptor(self) -> None:
        if self in _HELD:
            _HELD.remove(self)
            os.close(self._descriptor)


_HELD: set[Lock] = set()  # the locks of this process


def _close_copies() -> None:
    """Closes the lock files that a forked process has inherited; the parent keeps its locks."""
    for lock in list(_HELD):
        lock._close_descriptor()


os.register_at_fork(after_in_child=_close_copies)


def close_all() -> None:
    """Releases all locks of this process."""
    for lock in list(_HELD):
        lock.close()
