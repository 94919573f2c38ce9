# SPDX-License-Identifier: Apache-2.0
"""A JSON file that holds a result together with the settings that made it.

A later run opens it and learns whether its own settings made the result, and otherwise which of them differs. Other
files that hold such a mapping, from names to values, compare it by the functions of `base/changes.py`, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat.base.atomic import write_file
from dschat.base.changes import changed_names, first_change
from dschat.base.jsonl import read_object

MADE_FROM = "made_from"  # key of the settings in the file
CONTENT = "content"  # key of what they made


def settings_of_kept(path: Path) -> dict[str, Any] | None:
    """The settings that made the content of a `Kept` file; None if there is no such file, or it is damaged."""
    return read_object(path).get(MADE_FROM)


class Kept:
    """A JSON file with a content and the settings that made it.

    Example:
        >>> summary = Kept(folder / "made.json", {"seed": 1})
        >>> summary.open()  # None: there is no file, or it was made with other settings
        >>> summary.write("400 rows")
        >>> Kept(folder / "made.json", {"seed": 2}).difference()
        '--seed 1, now it is 2'
    """

    def __init__(self, path: Path, made_from: Mapping[str, Any]) -> None:
        """Names the file; reads nothing.

        Args:
            path: path of the file.
            made_from: everything that the content depends on, by name; values that JSON can hold.
        """
        self.path = path
        self.made_from: dict[str, Any] = json.loads(json.dumps(dict(made_from)))  # as they are read from the file

    def open(self) -> Any | None:
        """The content; None if there is no file, or if other settings made it.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged.
        """
        saved = self._read()
        if saved is None or changed_names(saved[MADE_FROM], self.made_from):
            return None
        return saved[CONTENT]

    def difference(self) -> str:
        """The first setting that differs from the file's, see `first_change`; empty if none does or there is no file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged.
        """
        saved = self._read()
        return "" if saved is None else first_change(saved[MADE_FROM], self.made_from)

    def write(self, content: Any) -> None:
        """Writes content and settings, replacing the file when the new one is complete. Raises OSError."""
        record = {MADE_FROM: self.made_from, CONTENT: content}
        write_file(self.path, json.dumps(record) + "\n")

    def _read(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        try:
            saved = json.loads(self.path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{self.path} is not valid JSON ({error})") from error
        if not isinstance(saved, dict) or not isinstance(saved.get(MADE_FROM), dict) or CONTENT not in saved:
            raise ValueError(f"{self.path} does not say what it was made from")
        return saved
