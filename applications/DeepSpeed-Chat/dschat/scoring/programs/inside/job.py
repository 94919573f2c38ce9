# SPDX-License-Identifier: Apache-2.0
"""What the parent hands in, as a file of `marshal`, which knows integers of any length."""

from __future__ import annotations

from typing import TypedDict


class JobFile(TypedDict):
    """A program, one input, and what it may use."""

    source: bytes
    input: bytes  # standard input
    function: str | None  # to call instead
    arguments: tuple[object, ...]
    seconds: float  # of the processor
    memory: int
    file_bytes: int
    files: int
    threads: int | None  # of a user namespace of its own; else all of the user's would count
    readable: list[str]  # folders
    hidden: list[str]  # folders below these
