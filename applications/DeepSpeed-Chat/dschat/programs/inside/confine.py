# SPDX-License-Identifier: Apache-2.0
"""Restricts this process: resource limits, capabilities, file access (Landlock) and system calls (seccomp).

The process cannot undo any of these.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import os
import re
import resource
import struct
from collections.abc import Sequence
from typing import NamedTuple

from .kernel import PR_CAPBSET_DROP, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, call, libc, prctl

STACK = 128 * 2**20  # bytes; programs recurse deeply

CAPABILITY_VERSION_3 = 0x20080522  # of capset's arguments: header of two words, data of six

# Landlock: all rights on files by version of its interface, and those for reading and writing.
ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
READ = 1 << 2 | 1 << 3  # files and folders
READ_WRITE = 1 << 1 | 1 << 2  # files
NETWORK_RIGHTS = 3  # bind and connect
SCOPES = 3  # abstract sockets and signals of other processes
CREATE_RULESET = 444
GET_VERSION = 1  # flag of CREATE_RULESET
ADD_RULE = 445
PATH_BENEATH = 1  # kind of rule
RESTRICT_SELF = 446

# A line of a BPF program: operation, lines to skip if true, lines to skip if false, operand.
Line = tuple[int, int, int, int]
SECCOMP_FILTER = 2  # mode of PR_SET_SECCOMP
# BPF: load a word of the system call's data, compare, return.
LOAD = 0x20
EQUAL = 0x15
ANY_BIT = 0x45
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
ERROR = 0x00050000
REFUSE: Line = (RETURN, 0, 0, ERROR | errno.EPERM)
# Offsets in the system call's data.
NUMBER = 0
MACHINE = 4
FIRST_ARGUMENT = 16
SECOND_ARGUMENT = 24
CLONE_THREAD = 0x10000
# Commands of fcntl that duplicate a descriptor, read or set its flags, or size a pipe. Among the others, F_SETOWN and
# F_SETSIG choose a process that gets a signal when a descriptor is ready, and F_SETLK locks a file of the interpreter,
# which all sandboxes and the machine share.
FCNTL_COMMANDS = (
    fcntl.F_DUPFD,
    fcntl.F_DUPFD_CLOEXEC,
    fcntl.F_GETFD,
    fcntl.F_SETFD,
    fcntl.F_GETFL,
    fcntl.F_SETFL,
    fcntl.F_GETPIPE_SZ,
    fcntl.F_SETPIPE_SZ,
)

# System calls of ordinary Python programs; all others are refused. None of these starts a process, opens a socket,
# locks a file, changes its owner, mode or times, mounts, traces or sets the clock.
# Name, number on x86_64, number on aarch64 (- if it does not exist).
CALLS = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  open 2 -  openat 257 56  close 3 57
close_range 436 436  lseek 8 62  stat 4 -  fstat 5 80  lstat 6 -  newfstatat 262 79  statx 332 291  access 21 -
faccessat 269 48  faccessat2 439 439  mmap 9 222  mprotect 10 226  munmap 11 215  mremap 25 216  madvise 28 233
brk 12 214  membarrier 324 283  msync 26 227  rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139
rt_sigtimedwait 128 137  rt_sigpending 127 136  rt_sigsuspend 130 133  sigaltstack 131 132  pause 34 -  alarm 37 -
setitimer 38 103  getitimer 36 102  poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create1 291 20
epoll_ctl 233 21  epoll_wait 232 -  epoll_pwait 281 22  pipe 22 -  pipe2 293 59  dup 32 23  dup2 33 -  dup3 292 24
sched_yield 24 124  sched_getaffinity 204 123  nanosleep 35 101  clock_nanosleep 230 115
clock_gettime 228 113  clock_getres 229 114  gettimeofday 96 169  time 201 -  times 100 153  getpid 39 172
getppid 110 173  gettid 186 178  getuid 102 174  geteuid 107 175  getgid 104 176  getegid 108 177  getgroups 115 158
uname 63 160  sysinfo 99 179  getrusage 98 165  getrlimit 97 163  getcpu 309 168  exit 60 93
exit_group 231 94  futex 202 98  set_robust_list 273 99  set_tid_address 218 96  rseq 334 293  arch_prctl 158 -
getrandom 318 278  restart_syscall 219 128  getcwd 79 17  chdir 80 49  fchdir 81 50  getdents64 217 61
readlink 89 -  readlinkat 267 78  umask 95 166  fadvise64 221 223  sendfile 40 71  statfs 137 43  fstatfs 138 44
"""
WORDS = CALLS.split()
X86_64 = {int(number) for number in WORDS[1::3]}
AARCH64 = {int(number) for number in WORDS[2::3] if number != "-"}


class SystemCalls(NamedTuple):
    """System calls of one kind of machine."""

    audit_arch: int  # the kernel's code of the machine
    allowed: set[int]
    clone: int
    clone3: int
    prlimit64: int
    tgkill: int
    fcntl: int


SYSTEM_CALLS = {
    "x86_64": SystemCalls(0xC000003E, X86_64, clone=56, clone3=435, prlimit64=302, tgkill=234, fcntl=72),
    "aarch64": SystemCalls(0xC00000B7, AARCH64, clone=220, clone3=435, prlimit64=261, tgkill=131, fcntl=25),
}


def limit_resources(seconds: float, memory: int, files: int, threads: int | None) -> None:
    """Sets limits that only the machine's administrator could raise again, and writes no more bytes to any file.

    Other processes of the user can no longer trace this one or read its memory.

    Args:
        seconds: processor time.
        memory: bytes of address space.
        files: open files.
        threads: threads and processes at the same time in the user namespace, from Linux 5.14 on; None for no limit.
    """
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds),
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_STACK: min(STACK, memory // 2),
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if threads is not None and release >= (5, 14):
        limits[resource.RLIMIT_NPROC] = threads
    for kind, limit in limits.items():
        _, hard_limit = resource.getrlimit(kind)
        if hard_limit != resource.RLIM_INFINITY:
            limit = min(limit, hard_limit)
        resource.setrlimit(kind, (limit, limit))
    prctl(PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Gives up all capabilities for good, and the possibility to gain one from a file."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == -1:
            break
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    no_capabilities = bytes(24)
    call("capset", header, no_capabilities)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def restrict_files(readable: Sequence[str], devices: Sequence[str]) -> int:
    """Landlock: allows reading some folders, and reading and writing devices.

    Returns:
        The version of the kernel's interface; 0 if it has none, and nothing was restricted.
    """
    version = libc.syscall(CREATE_RULESET, None, 0, GET_VERSION)
    if version < 1:
        return 0
    rights = ALL_RIGHTS[min(version, max(ALL_RIGHTS))]
    handled = [rights]
    if version >= 4:
        handled.append(NETWORK_RIGHTS)
    if version >= 6:
        handled.append(SCOPES)
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    ruleset = call("syscall", CREATE_RULESET, attributes, len(attributes), 0)
    allowed_rights = dict.fromkeys(readable, READ) | dict.fromkeys(devices, READ_WRITE)
    for path, allowed in allowed_rights.items():
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call("syscall", ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return int(version)


def restrict_calls() -> bool:
    """seccomp: allows the system calls above and threads; all others fail with EPERM.

    Returns:
        False on other machines, and if the kernel has no filters; then nothing was restricted.
    """
    system_calls = SYSTEM_CALLS.get(os.uname().machine)
    if system_calls is None:
        return False
    code = b"".join(struct.pack("=HBBI", *line) for line in _filter(system_calls))
    program = ctypes.create_string_buffer(code)
    pointer = struct.pack("@HP", len(code) // 8, ctypes.addressof(program))
    try:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_SECCOMP, SECCOMP_FILTER, pointer)
    except OSError:
        return False
    return True


def _filter(system_calls: SystemCalls) -> list[Line]:
    """The BPF program that allows the system calls above. It holds this process's id: no fork may follow."""
    lines = [
        (LOAD, 0, 0, MACHINE),
        (EQUAL, 1, 0, system_calls.audit_arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        # The C library falls back from clone3, whose flags a filter cannot read, to clone.
        (EQUAL, 0, 1, system_calls.clone3),
        (RETURN, 0, 0, ERROR | errno.ENOSYS),
    ]
    for number in sorted(system_calls.allowed):
        lines.append((EQUAL, 0, 1, number))
        lines.append((RETURN, 0, 0, ALLOW))
    # Threads, but no processes; the process's own limits, as those of process 0; signals to itself.
    lines += _allow_if(system_calls.clone, FIRST_ARGUMENT, ANY_BIT, [CLONE_THREAD])
    lines += _allow_if(system_calls.prlimit64, FIRST_ARGUMENT, EQUAL, [0])
    lines += _allow_if(system_calls.tgkill, FIRST_ARGUMENT, EQUAL, [os.getpid()])
    lines += _allow_if(system_calls.fcntl, SECOND_ARGUMENT, EQUAL, FCNTL_COMMANDS)
    lines.append(REFUSE)
    return lines


def _allow_if(number: int, argument_offset: int, operation: int, operands: Sequence[int]) -> list[Line]:
    """Lines that allow a system call if a comparison of its argument is true for one of the operands."""
    comparisons: list[Line] = []
    for operand in operands:
        comparisons.append((operation, 0, 1, operand))
        comparisons.append((RETURN, 0, 0, ALLOW))
    block = [(LOAD, 0, 0, argument_offset), *comparisons, REFUSE]
    return [(EQUAL, 0, len(block), number), *block]
