# SPDX-License-Identifier: Apache-2.0
"""A lock on a folder or file that several processes might write."""

import os
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dschat.base.atomic import missing_folders, remove_empty
from dschat.base.errors import UserError

PATIENCE = 30.0  # seconds that a process waits for another one that holds the lock only for a moment
PAUSE = 0.02  # seconds between two attempts


class Lock:
    """An exclusive lock, held until `close` or the end of this process.

    The kernel releases the lock of a process that is killed, and network file systems enforce it between machines.
    Forks and started programs do not hold it. `close` removes the file, and also its new parent folders if they are
    empty.
    """

    def __init__(self, file: Path, what: str, waits: bool = False) -> None:
        """Acquires the lock, and creates its file.

        Args:
            file: the lock file.
            what: a flag and its value, for messages.
            waits: wait up to 30 s until another process releases the lock.

        Raises:
            UserError: another process holds the lock, or the file cannot be made.
        """
        self._file = file
        self._what = what
        self._new_folders = missing_folders(file.parent)
        self._lock = FileLock(file, timeout=PATIENCE if waits else 0, thread_local=False)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(poll_interval=PAUSE)
            self._locked_file = file.stat()
        except Timeout as error:
            raise UserError(
                f"{what}: another process is writing it. Wait for its end, stop it, or write elsewhere."
            ) from error
        except OSError as error:
            self._lock.release()
            remove_empty(self._new_folders)
            raise UserError(f"{what}: cannot be written: {error}") from error
        _HELD.add(self)

    def check(self) -> None:
        """Raises UserError if the lock is lost: its file was removed, so that another process can have it."""
        if not self.is_held():
            raise UserError(
                f"{self._what}: this run has lost its lock {self._file}. It stops, because another process may be "
                "writing here."
            )

    def is_held(self) -> bool:
        """Whether the lock file is still the one that this process has locked."""
        try:
            return os.path.samestat(self._locked_file, self._file.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Releases the lock; does nothing in a fork, which does not hold it."""
        with suppress(OSError):  # the disk is gone; the kernel releases the lock all the same
            if self._lock.is_locked and self.is_held():
                self._file.unlink()
                remove_empty(self._new_folders)
        self._lock.release()
        _HELD.discard(self)


_HELD: set[Lock] = set()  # the locks of this process


def close_all() -> None:
    """Releases all locks of this process."""
    for lock in list(_HELD):
        lock.close()
