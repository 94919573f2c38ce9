# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are whole or not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LAST = "config.json"  # what makes a folder a model's comes last
REPLACED = ".replaced-by-a-newer-one"  # ends the name of a folder that makes way, for as long as it takes


@contextmanager
def written_beside(root: Path, place: Path, before_moving: Callable[[], None]) -> Iterator[Path]:
    """A new folder in ``root`` to write into; afterwards its files and folders are in ``place``, beside what is there.

    A file or folder that was there stays as it is until its successor is whole. If writing fails, nothing is replaced.

    Args:
        root: of the file system of ``place``; made if need be.
        place: where the content goes; made if need be.
        before_moving: called when everything is written.
    """
    beside = root / ".writing"
    shutil.rmtree(beside, ignore_errors=True)  # what a killed process left
    end_moves(place)
    beside.mkdir(parents=True)
    try:
        yield beside
        _flush(beside)
        before_moving()
        place.mkdir(parents=True, exist_ok=True)
        for entry in sorted(beside.iterdir(), key=lambda entry: entry.name == LAST):
            _move(entry, place / entry.name)
        _flush_one(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def end_moves(place: Path) -> None:
    """Ends what a process that was killed between two renames began: a folder without its successor comes back."""
    for old in place.glob(f".*{REPLACED}"):
        target = place / old.name[1:].removesuffix(REPLACED)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)


def write_whole(file: Path, text: str) -> None:
    """Writes a text file in UTF-8; until it is written, what was there before stays."""
    beside = file.with_name(f".{file.name}.writing")
    beside.write_text(text, encoding="utf-8")
    _flush_one(beside)
    beside.replace(file)


def _move(entry: Path, target: Path) -> None:
    """Renames; a folder first makes way for the new one."""
    if not target.is_dir():
        entry.replace(target)
        return
    old = target.with_name(f".{target.name}{REPLACED}")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    entry.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Waits until everything in a folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        _flush_one(path)


def _flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
