# SPDX-License-Identifier: Apache-2.0
"""Answers of judge models on the disk, so that no question is paid for twice."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat.errors import UserError


class ReplyCache:
    """A folder with one small file per answer, named by the digest of its question.

    Files appear whole or not at all, so that several runs may share a folder and a kill breaks nothing. A file that
    cannot be read counts as missing.
    """

    def __init__(self, folder: Path) -> None:
        """Makes nothing on the disk yet."""
        self.folder = folder

    def prepare(self) -> None:
        """Makes the folder, so that nothing is asked whose answer cannot be kept.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise self._unwritable(error) from error

    def get(self, digest: str) -> dict[str, Any] | None:
        """The answer to a question; None if there is none."""
        try:
            value = json.loads(self._file(digest).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def put(self, digest: str, reply: Mapping[str, Any]) -> None:
        """Keeps an answer.

        Raises:
            UserError: the folder cannot be written.
        """
        file = self._file(digest)
        partial = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(dict(reply)), encoding="utf-8")
            partial.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"--cache {self.folder}: cannot be written: {error}")

    def _file(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"
