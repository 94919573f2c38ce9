# SPDX-License-Identifier: Apache-2.0
"""A process in namespaces of its own: no network, no other processes, a root that holds the interpreter alone."""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress

from .kernel import PR_SET_PDEATHSIG, call, prctl

# unshare(2): user, process ids, network, mounts, inter-process communication, host name, control groups.
NEW_USER, NEW_OTHERS = 0x10000000, 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x02000000
# mount(2)
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
# statvfs' flag → mount's: a remount may not take away what the place has already.
KEPT = {1: READ_ONLY, 2: NO_SUID, 4: NO_DEVICES, 8: NO_PROGRAMS, 1024: 1024, 2048: 2048, 4096: 1 << 21}
ROOT = "/proc"  # where the new root is put together: it is everywhere, and the interpreter never lies below it
WORK = "/program"
DEVICES = ("/dev/null", "/dev/urandom")
OURS, PROGRAM = 65533, 65534  # users in the namespace: who started it, and the program's own, nobody outside
MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000


def enter(readable: Sequence[str], hidden: Sequence[str], work_bytes: int, info: int, mapped: int) -> None:
    """Returns in a child that is alone; this process waits for it and exits as it does.

    Args:
        readable: folders of the interpreter and its libraries, which keep their paths.
        hidden: folders below these that are to be empty.
        work_bytes: size of the folder `WORK`, which is empty, in memory and gone with the process.
        info: gets the number of the process with the new namespaces.
        mapped: has something to read when the users of the namespace are named.

    Raises:
        OSError: the system does not allow it.
    """
    call("unshare", NEW_USER | NEW_OTHERS)
    os.write(info, b"%d" % os.getpid())
    os.read(mapped, 1)
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(128 - status if status < 0 else status)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    call("sethostname", b"sandbox", 7)
    _private_root(readable, hidden, work_bytes)


def become_program(readable: Sequence[str]) -> None:
    """Becomes the user `PROGRAM`, where that can be: root's threads have no limit, whatever its name."""
    if not all(os.stat(path).st_mode & 0o005 == 0o005 for path in readable):
        return
    with suppress(OSError):  # the namespace has no such user
        os.chown(os.getcwd(), PROGRAM, -1)
        os.setresuid(PROGRAM, PROGRAM, PROGRAM)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the change took it away


def _private_root(readable: Sequence[str], hidden: Sequence[str], work_bytes: int) -> None:
    os.umask(0o022)
    call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    _memory_folder(ROOT, 2**20)
    for path in readable:
        if os.path.islink(path):
            os.symlink(os.readlink(path), ROOT + path)
        else:
            _bind(path)
    for path in hidden:
        _memory_folder(ROOT + path, 4096)
        _read_only(ROOT + path)
    for device in DEVICES:
        _bind(device)
    os.mkdir(ROOT + WORK)
    _memory_folder(ROOT + WORK, work_bytes)
    _remount(ROOT)
    # The old root goes on top of the new one and is taken away from there.
    os.chdir(ROOT)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir(WORK)


def _memory_folder(place: str, size: int) -> None:
    options = f"size={size},nr_inodes=4096,mode=755".encode()
    call("mount", b"tmpfs", os.fsencode(place), b"tmpfs", NO_SUID | NO_DEVICES | NO_PROGRAMS, options)


def _bind(path: str) -> None:
    place = ROOT + path
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        _write(place, "")
    call("mount", os.fsencode(path), os.fsencode(place), None, BIND | RECURSIVE, None)
    _read_only(place)


def _read_only(place: str) -> None:
    """Makes a mount read-only with all that is mounted below it; before Linux 5.12 without that."""
    attributes = struct.pack("4Q", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY, NOSUID
    try:
        call("syscall", MOUNT_SETATTR, 2**64 - 100, os.fsencode(place), AT_RECURSIVE, attributes, len(attributes))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        _remount(place)


def _remount(place: str) -> None:
    had = os.statvfs(place).f_flag
    kept = sum(mount for found, mount in KEPT.items() if had & found)
    flags = REMOUNT | BIND | READ_ONLY | NO_SUID | (kept & ~READ_ONLY)
    call("mount", None, os.fsencode(place), None, flags, None)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
