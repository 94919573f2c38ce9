# SPDX-License-Identifier: Apache-2.0
"""Answers of judge models on the disk, so that no question is paid for twice."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from dschat.common.jsonl import write_rows
from dschat.evaluation.judge.question import Reply


class ReplyCache:
    """A folder with one small file per answer, named by the digest of its question.

    Files appear whole or not at all, so that several runs may share a folder and a kill breaks nothing. A file that
    cannot be read counts as missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, digest: str) -> Reply | None:
        """The answer to a question; None if there is none."""
        try:
            kept = json.loads(self._file(digest).read_text(encoding="utf-8"))
            return Reply(kept["text"], kept["refusal"], kept["model"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, digest: str, reply: Reply) -> None:
        """Keeps an answer; raises UserError where the folder cannot be written."""
        write_rows(self._file(digest), [asdict(reply)])

    def _file(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"
