# SPDX-License-Identifier: Apache-2.0
"""The job that the parent passes in, as a file of `marshal`, which supports integers of any length."""

from __future__ import annotations

from typing import TypedDict


class JobFile(TypedDict):
    """A program, one input, and its limits."""

    source: bytes
    input: bytes  # standard input
    function: str | None  # function to call; None for a program that reads standard input
    arguments: tuple[object, ...]
    seconds: float  # processor time
    memory: int
    files: int
    threads: int | None  # in its own user namespace; None without one, where all threads of the user would count
    readable: list[str]  # folders
    hidden: list[str]  # folders inside these
