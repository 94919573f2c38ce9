# SPDX-License-Identifier: Apache-2.0
"""Answers of models on chat servers, and a folder that keeps them for runs that ask the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dschat.base.fingerprints import content_hash
from dschat.base.jsonl import write_rows, write_rows_once


@dataclass(frozen=True)
class Reply:
    """A model's answer.

    Attributes:
        text: content of the answer.
        refusal: the message's field `refusal`, in which a model declines to answer; usually empty.
        model: the server's name of the model that answered.
        flaw: why the text may be incomplete, with the remedy; empty if nothing suggests it.
    """

    text: str
    refusal: str
    model: str
    flaw: str = ""


class ReplyCache:
    """A folder with one small file per answer, named by `digest_of` everything that the answer depends on.

    Files are written atomically, so several runs may share a folder, and a killed run leaves no broken file. A file
    that cannot be read and an unusable answer count as missing: their questions are asked again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, digest: str, is_usable: Callable[[Reply], bool]) -> Reply | None:
        """The saved usable answer to a question; None if there is none."""
        try:
            fields = json.loads(self._file(digest).read_text(encoding="utf-8"))
            reply = Reply(**fields)
        except (OSError, ValueError, TypeError):
            return None
        if not all(isinstance(value, str) for value in fields.values()):
            return None
        return reply if is_usable(reply) else None

    def put(self, digest: str, reply: Reply, is_usable: Callable[[Reply], bool]) -> Reply:
        """Saves a usable answer unless another process has saved one to the same question.

        A file that cannot be read, or holds an unusable answer, is replaced.

        Returns:
            The saved answer; the given one if it is not usable.

        Raises:
            UserError: the folder cannot be written.
        """
        if not is_usable(reply):
            return reply
        write_rows_once(self._file(digest), [asdict(reply)])
        saved = self.get(digest, is_usable)
        if saved is not None:
            return saved
        write_rows(self._file(digest), [asdict(reply)])
        return reply

    def _file(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"


def digest_of(content: Mapping[str, object]) -> str:
    """Hash of a question and of everything else that its answer depends on: 64 hexadecimal digits."""
    return content_hash(json.dumps(content, sort_keys=True))
