# SPDX-License-Identifier: Apache-2.0
"""A results file that takes long to write: rows are saved as they are made, and a killed run resumes after them.

`evaluation/runner.py` is the loop of commands that write such files. `require_writable` finds out before the work that
a folder cannot be written.
"""

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dschat.base.atomic import missing_folders, remove_empty, reporting
from dschat.base.changes import first_change
from dschat.base.errors import UserError
from dschat.base.jsonl import dump_row, write_rows
from dschat.base.lock import Lock

logger = logging.getLogger(__name__)

PARTIAL = ".partial"  # suffix of a journal's name
SETTINGS = "settings"  # in the first line of a journal: the settings of the run
OVERWRITES = "overwrites"  # in the first line of a journal that was begun with overwrite


class Journal:
    """The rows of a results file that is being made.

    They are in ``<file>.partial``, after a first line with the settings of the run, in the order in which they were
    made. `finish` writes the file itself in one step and removes the journal, so that an existing file is a finished
    one. After a kill the same command resumes, even one that overwrites: the first line says whether the journal was
    begun by such a run. `rows` are the rows that an interrupted run had saved.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
        """Opens the journal of a file, or starts one.

        Args:
            path: path of the file to make.
            settings: everything that the rows depend on: flag → value that JSON can hold.
            overwrite: replace a finished file when the new one is finished, and drop an interrupted run, unless it
                was begun with overwrite and equal settings: then resume it.

        Raises:
            UserError: the path is a folder; the file is finished, was begun with other settings, is being written by
                another process or cannot be written.
        """
        if path.is_dir():
            raise UserError(f"{path}: a folder. Give the path of a file to write, such as {path / 'results.jsonl'}.")
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL)
        written_settings = json.loads(dump_row(settings))  # as they will be read again
        self._lock = Lock(path.with_name(f".{path.name}.lock"), str(path))
        try:
            with reporting(str(self.partial)):
                if path.exists() and not overwrite:
                    raise UserError(f"{path} exists, finished. Remove it or give --overwrite to make it again.")
                self._file = open(self.partial, "a+b")  # noqa: SIM115
                if overwrite and begun_settings(path, overwrite) != written_settings:
                    self._file.truncate(0)
                self.rows = self._recover(written_settings)
                if not self.rows:
                    self._file.truncate(0)
                    self._write([{SETTINGS: written_settings, OVERWRITES: overwrite}])
        except UserError:
            self._lock.close()
            raise
        self._has_rows = bool(self.rows)
        if self.rows:
            remedy = f"; to start anew remove {self.partial}" if overwrite else ""
            logger.info("%s: going on after %d rows of an interrupted run%s", path, len(self.rows), remedy)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Saves rows; they are on the disk when this returns. Raises UserError if that is not possible."""
        with reporting(str(self.partial)):
            self._write(rows)
        self._has_rows = True

    def finish(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the file with these rows, in this order, and removes the journal."""
        write_rows(self.path, rows)
        self.partial.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Leaves the journal for a later run; removes one without rows, of a run that was refused when it started."""
        self._file.close()
        if not self._has_rows:
            self.partial.unlink(missing_ok=True)
        self._lock.close()

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.write("".join(map(dump_row, rows)).encode("utf-8"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _recover(self, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of an interrupted run with these settings; an incomplete last line is cut off."""
        self._file.seek(0)
        content = self._file.read()
        complete = content[: content.rfind(b"\n") + 1]
        lines: list[dict[str, Any]] = []
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                lines.append(_object_of(line))
            except ValueError as error:
                raise UserError(f"{self.partial}:{number}: no JSON object; remove the file to start again.") from error
        if len(lines) < 2:  # no rows that other settings could have made
            return []

        begun_with = lines[0].get(SETTINGS)
        if not isinstance(begun_with, dict):
            raise UserError(f"{self.partial}:1: the settings of the run are missing; remove the file to start again.")
        difference = first_change(begun_with, settings)
        if difference:
            remedy = "give the same again to go on, or --overwrite to start anew."
            raise UserError(f"{self.partial} was begun with {difference}: {remedy}")
        self._file.truncate(len(complete))
        return lines[1:]


def begun_settings(path: Path, overwrite: bool = False) -> dict[str, Any] | None:
    """The settings of the interrupted run that a results file resumes, see `Journal`; None without such a run."""
    try:
        with open(path.with_name(path.name + PARTIAL), "rb") as lines:
            first_line = _object_of(lines.readline())
    except (OSError, ValueError):
        return None
    settings = first_line.get(SETTINGS)
    is_resumed = first_line.get(OVERWRITES) or not overwrite
    return settings if is_resumed and isinstance(settings, dict) else None


def _object_of(line: bytes) -> dict[str, Any]:
    """The JSON object in a line. Raises ValueError for anything else."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError(f"{type(content).__name__} instead of an object")
    return content


def require_writable(folder: Path, what: str) -> None:
    """Raises UserError, which begins with `what`, if no file can be written to a folder.

    A folder that does not exist is made for the test and removed again.
    """
    made = missing_folders(folder)
    try:
        with reporting(what):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    finally:
        remove_empty(made)
