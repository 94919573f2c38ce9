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

TRIES = 1500  # attempts to get a lock that is being written, removed or waited for
PAUSE = 0.02  # seconds between two attempts


class Lock:
    """Keeps other processes out, until `close` or the end of this process.

    The kernel knows whether the holder is alive: an flock ends with its process, on network file systems for all
    machines. (A POSIX lock would be lost when this process closes another descriptor of the file.) Programs that are
    started do not inherit it, and a fork closes its copy, so that no child keeps it. The file names the process that
    holds it, and the file of a killed process is removed. On a disk without flock, an existing file counts as held.
    Folders that are made for the file are removed with it, unless they hold something else by then.
    """

    def __init__(
        self,
        file: Path,
        what: str,
        waits: bool = False,
    ) -> None:
        """Acquires the lock, and creates its file.

        Args:
            file: the lock file.
            what: a flag and its value, for messages.
            waits: wait up to 30 s for another holder; a holder that has not written its name yet is waited for in any
                case.

        Raises:
            UserError: another process holds the lock, or the file cannot be made.
        """
        self._file = file
        self._what = what
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        self._owner = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
        self._made = missing_folders(file.parent)
        try:
            for _ in range(TRIES):
                file.parent.mkdir(parents=True, exist_ok=True)  # another process may just have removed it again
                holder = self._try_once()
                if holder is None or (holder and not waits):
                    break
                time.sleep(PAUSE)
        except OSError as error:
            self._let_go()
            remove_empty(self._made)
            raise UserError(f"{what}: cannot be written: {error}") from error
        if holder is not None:
            remedy = "Wait for its end, stop it, or write elsewhere."
            raise UserError(f"{what}: another process is writing it: {holder or 'unknown'}. {remedy}")

    def check(self) -> None:
        """Raises UserError if the lock is lost: its file was removed, or names another process."""
        if not self.is_held():
            holder = self._holder()
            raise UserError(
                f"{self._what}: its lock, {self._file}, was taken away ({holder} has it):"
                " the run ends, because another may write here."
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
                remove_empty(self._made)
        self._let_go()

    def _try_once(self) -> str | None:
        """Tries to get the lock: None if this process has it now, else who holds it; "" if that is not known yet."""
        is_new = not self._file.exists()
        flags = os.O_RDWR
        if is_new:
            flags |= os.O_CREAT | os.O_EXCL
        try:
            self._descriptor = os.open(self._file, flags, 0o666)
        except (FileExistsError, FileNotFoundError):
            return ""  # another process made or removed it just now
        _HELD.add(self)
        is_free = True
        advice = ""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            is_free = False
        except OSError:
            advice = f" (a disk without locks: if that process is gone, remove {self._file})"
        holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace")
        if not self._is_in_place():
            holder = ""  # removed since it was opened
        elif is_free and not holder and (is_new or not advice):
            os.pwrite(self._descriptor, self._owner.encode(), 0)
            return None
        elif is_free and not advice:  # a killed process left it
            self._file.unlink()
            holder = ""
        self._let_go()
        return holder + advice if holder else ""

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False

    def _let_go(self) -> None:
        if self in _HELD:
            _HELD.remove(self)
            os.close(self._descriptor)


_HELD: set[Lock] = set()  # the locks of this process


def _close_copies() -> None:
    """Closes the lock files that a forked process has inherited; the parent keeps its locks."""
    for lock in list(_HELD):
        lock._let_go()


os.register_at_fork(after_in_child=_close_copies)


def close_all() -> None:
    """Releases all locks of this process."""
    for lock in list(_HELD):
        lock.close()
