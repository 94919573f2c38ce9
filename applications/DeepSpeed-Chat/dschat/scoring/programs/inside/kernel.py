# SPDX-License-Identifier: Apache-2.0
"""The C library's calls that Python does not offer."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 22, 38


def call(name: str, *arguments: object) -> int:
    """A function of libc; None is a null pointer. Raises OSError where it returned -1."""
    found: int = getattr(libc, name)(*(_argument(argument) for argument in arguments))
    if found == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return found


def prctl(option: int, value: object = 0, further: object = 0) -> None:
    """prctl(2); raises OSError."""
    call("prctl", option, value, further, 0, 0)


def _argument(argument: object) -> object:
    # A plain int would be passed as 32 bits.
    return ctypes.c_ulong(argument) if isinstance(argument, int) and argument >= 0 else argument
