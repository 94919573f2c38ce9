# SPDX-License-Identifier: Apache-2.0
"""Interrupts a function before, after and within each of its renames and removals, by a kill or by Ctrl-C."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

KILL, CTRL_C = "kill", "ctrl-c"
STEPS = (os, "replace"), (shutil, "rmtree")
KILLED = 9


def stopped_at(point: int, how: str, act: Callable[[], object]) -> bool:
    """Whether it came to that point: before the first rename is 0, after it 1, before the next 2."""
    if how == CTRL_C:
        return _run(point, act, interrupt)
    child = os.fork()
    if child == 0:
        try:
            _run(point, act, lambda: os._exit(KILLED))
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED), "it failed"
    return status == KILLED


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt


def _run(point: int, act: Callable[[], object], stop: Callable[[], object]) -> bool:
    seen, removal = [0], shutil.rmtree

    def look() -> None:
        seen[0] += 1
        if seen[0] == point + 1:
            stop()

    def stopping(step: Callable[..., object]) -> Callable[..., object]:
        def taken(*args: object, **named: object) -> object:
            look()
            if step is removal and (files := [file for file in Path(str(args[0])).rglob("*") if file.is_file()]):
                files[0].unlink()  # a removal may end half-way
                look()
            done = step(*args, **named)
            look()
            return done

        return taken

    patches = [patch.object(module, name, stopping(getattr(module, name))) for module, name in STEPS]
    for each in patches:
        each.start()
    try:
        with suppress(KeyboardInterrupt):
            act()
    finally:
        for each in patches:
            each.stop()
    return seen[0] > point
