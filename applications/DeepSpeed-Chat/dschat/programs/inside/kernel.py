# SPDX-License-Identifier: Apache-2.0
"""Functions of the C library that Python does not offer."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38


def call(name: str, *arguments: object) -> int:
    """Calls a function of libc; None is a null pointer. Raises OSError if it returns -1."""
    result: int = getattr(libc, name)(*map(_argument, arguments))
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def prctl(option: int, value: object = 0, second_value: object = 0) -> None:
    """prctl(2); raises OSError."""
    call("prctl", option, value, second_value, 0, 0)


def _argument(argument: object) -> object:
    # ctypes would pass an int as 32 bits.
    if isinstance(argument, int) and argument >= 0:
        return ctypes.c_ulong(argument)
    return argument
