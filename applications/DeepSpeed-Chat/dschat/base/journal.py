# SPDX-License-Identifier: Apache-2.0
"""A file of results that takes long to make: rows are kept as they come, and a killed run goes on where it stood."""

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dschat.base.atomic import missing_folders, remove_empty, reporting
from dschat.base.errors import UserError
from dschat.base.jsonl import dump_row, write_rows
from dschat.base.kept import first_change
from dschat.base.lock import Lock

logger = logging.getLogger(__name__)

PARTIAL = ".partial"  # ends the name of a journal
OVERWRITES = "overwrites"  # in the first line of a journal that was begun with overwrite


class Journal:
    """Rows on their way to a file.

    They lie in ``<file>.partial``, after a first line with the settings of the run, in the order they came. `finish`
    writes the file itself, at once, and removes the journal. A file that is there is finished. The same command goes
    on after a kill, also one that overwrites: the first line tells whether the journal was begun by such a run.
    `rows` are what an interrupted run had kept.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        """Opens the journal of a file, or starts one.

        Args:
            path: of the file to make.
            settings: what the rows depend on: flag → value that JSON can hold.
            overwrite: replace a finished file when the new one is, and drop an interrupted run, unless that was
                begun with overwrite and the same settings: then go on with it.

        Raises:
            UserError: the file is finished, was begun with other settings, is being written by another process or
                cannot be written.
        """
        self.path, self.partial = path, path.with_name(path.name + PARTIAL)
        self._holds_rows = False
        known: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        self._lock = Lock(path.with_name(f".{path.name}.lock"), str(path))
        try:
            with reporting(str(self.partial)):
                if path.exists() and not overwrite:
                    raise UserError(f"{path} exists, finished. Remove it or give --overwrite to make it again.")
                self._file = open(self.partial, "a+b")  # noqa: SIM115
                self.rows = self._recover_overwriting(known) if overwrite else self._recover(known)
                if not self.rows:
                    self._file.truncate(0)
                    self.append([{"settings": known} | ({OVERWRITES: True} if overwrite else {})])
                self._holds_rows = bool(self.rows)
        except UserError:
            self._lock.close()
            raise
        if self.rows:
            again = f"; to start anew remove {self.partial}" if overwrite else ""
            logger.info("%s: going on after %d rows of an interrupted run%s", path, len(self.rows), again)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Keeps rows; when this returns they are on the disk. Raises UserError where that is not possible."""
        with reporting(str(self.partial)):
            self._file.write("".join(map(dump_row, rows)).encode("utf-8"))
            self._file.flush()
            os.fsync(self._file.fileno())
        self._holds_rows = True

    def finish(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the file with these rows, in this order, and removes the journal."""
        write_rows(self.path, rows)
        self.partial.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Leaves the journal for a later run; removes one without rows, as of a run that was refused at its start."""
        self._file.close()
        if not self._holds_rows:
            self.partial.unlink(missing_ok=True)
        self._lock.close()

    def _recover_overwriting(
        self,
        settings: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """The rows of an interrupted run that was begun with overwrite and these settings; else none."""
        self._file.seek(0)
        try:
            return self._recover(settings) if json.loads(self._file.readline()).get(OVERWRITES) else []
        except (ValueError, AttributeError, UserError):
            return []

    def _recover(
        self,
        settings: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """The rows of an interrupted run; what a kill left of a last line is cut off."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise UserError(f"{self.partial}:{number}: not valid JSON; remove the file to start anew.") from error
        if len(rows) < 2:  # nothing that other settings could spoil
            return []
        if "settings" not in rows[0]:
            raise UserError(f"{self.partial}:1: no settings of a run; remove the file to start anew.")
        before: dict[str, Any] = rows[0]["settings"]
        if changed := first_change(before, settings):
            remedy = "give the same again to go on, or --overwrite to start anew."
            raise UserError(f"{self.partial} was begun with {changed}: {remedy}")
        self._file.truncate(len(whole))
        return rows[1:]


def begun_settings(path: Path, overwrite: bool = False) -> dict[str, Any]:
    """The settings of the interrupted run that a file of results goes on with, see `Journal`; none without one."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, encoding="utf-8") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError):
        return {}
    if not isinstance(first, dict) or (overwrite and not first.get(OVERWRITES)):
        return {}
    settings = first.get("settings")
    return settings if isinstance(settings, dict) else {}


def make_writable(folder: Path, what: str) -> None:
    """Raises UserError, which begins with `what`, if no file can be put into a folder, which is made for a moment."""
    made = missing_folders(folder)
    try:
        with reporting(what):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    finally:
        remove_empty(made)
