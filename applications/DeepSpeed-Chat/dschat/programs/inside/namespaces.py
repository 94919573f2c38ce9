# SPDX-License-Identifier: Apache-2.0
"""Moves this process into new namespaces: no network, no other processes, a read-only root with the interpreter."""

from __future__ import annotations

import errno
import os
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress

from .kernel import PR_SET_PDEATHSIG, call, prctl

# unshare(2): user, process ids, network, mounts, inter-process communication, host name, control groups.
NEW_USER = 0x10000000
NEW_OTHERS = 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x02000000
# mount(2)
READ_ONLY = 1
NO_SUID = 2
NO_DEVICES = 4
NO_PROGRAMS = 8
REMOUNT = 32
BIND = 4096
RECURSIVE = 16384
PRIVATE = 1 << 18
DETACH = 2
# Flag of statvfs → flag of mount; a remount must keep those that are set.
MOUNT_FLAGS = {1: READ_ONLY, 2: NO_SUID, 4: NO_DEVICES, 8: NO_PROGRAMS, 1024: 1024, 2048: 2048, 4096: 1 << 21}
ROOT = "/proc"  # where the new root is built: it always exists, and the interpreter is never inside it
WORK = "/program"
DEVICES = ("/dev/null", "/dev/urandom")
# Users in the namespace: the one who started it, and the program's own, who is nobody outside.
OURS = 65533
PROGRAM = 65534
MOUNT_SETATTR = 442
AT_RECURSIVE = 0x8000


def enter(readable: Sequence[str], hidden: Sequence[str], info: int, mapped: int) -> None:
    """Returns in a child process inside the namespaces; this process waits for the child and exits with its status.

    Args:
        readable: folders of the interpreter and its libraries, which keep their paths.
        hidden: folders inside these that are to be empty.
        info: receives the id of the process with the new namespaces.
        mapped: has data when the users of the namespace are mapped.

    Raises:
        OSError: the system does not allow it.
    """
    call("unshare", NEW_USER | NEW_OTHERS)
    os.write(info, b"%d" % os.getpid())
    os.read(mapped, 1)
    child = os.fork()
    if child:
        _, wait_status = os.waitpid(child, 0)
        status = os.waitstatus_to_exitcode(wait_status)
        os._exit(128 - status if status < 0 else status)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    call("sethostname", b"sandbox", 7)
    _private_root(readable, hidden)


def become_program(readable: Sequence[str]) -> None:
    """Becomes the user `PROGRAM` if possible, since the kernel does not limit the threads of root."""
    if not all(os.stat(path).st_mode & 0o005 == 0o005 for path in readable):
        return
    with suppress(OSError):  # the namespace has no such user
        os.setresuid(PROGRAM, PROGRAM, PROGRAM)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user has cleared it


def _private_root(readable: Sequence[str], hidden: Sequence[str]) -> None:
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
    _remount(ROOT)
    # The old root is mounted on top of the new one, and unmounted there.
    os.chdir(ROOT)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir(WORK)


def _memory_folder(target: str, size: int) -> None:
    """Mounts a folder in memory."""
    options = f"size={size},nr_inodes=4096,mode=755".encode()
    call("mount", b"tmpfs", os.fsencode(target), b"tmpfs", NO_SUID | NO_DEVICES | NO_PROGRAMS, options)


def _bind(path: str) -> None:
    """Mounts a folder or file of the old root read-only at the same path of the new one."""
    target = ROOT + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass
    call("mount", os.fsencode(path), os.fsencode(target), None, BIND | RECURSIVE, None)
    _read_only(target)


def _read_only(target: str) -> None:
    """Makes a mount read-only, from Linux 5.12 on with all mounts inside it."""
    attributes = struct.pack("4Q", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY, NOSUID
    try:
        call("syscall", MOUNT_SETATTR, 2**64 - 100, os.fsencode(target), AT_RECURSIVE, attributes, len(attributes))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        _remount(target)


def _remount(target: str) -> None:
    """Makes a single mount read-only, and keeps its other flags."""
    present = os.statvfs(target).f_flag
    flags = REMOUNT | BIND | READ_ONLY | NO_SUID
    for statvfs_flag, mount_flag in MOUNT_FLAGS.items():
        if present & statvfs_flag:
            flags |= mount_flag
    call("mount", None, os.fsencode(target), None, flags, None)
