# SPDX-License-Identifier: Apache-2.0
"""What a program may use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one test, except where another thing is said."""

    seconds: float = 4.0  # of the clock, and of the processor
    program_seconds: float = 60.0  # of the clock, all tests of a program together
    memory: int = 2**30  # bytes of address space; a thread's stack counts whole
    file_bytes: int = 16 * 2**20  # of one file, and of its folder
    output_bytes: int = 8 * 2**20  # printed or returned
    open_files: int = 64
    threads: int = 64  # and processes, at a time
