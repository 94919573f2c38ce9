# SPDX-License-Identifier: Apache-2.0
"""The file of votes: every vote is on the disk before the next question, and several raters may write at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dschat.common.jsonl import read_rows, write_rows
from dschat.errors import UserError
from dschat.evaluation.pairs.comparisons import Comparison, comparison_of
from dschat.evaluation.pairs.responses import Pair

FLAG = "--output"


class VoteFile:
    """Votes of people, one row each, in the order they were given.

    Nothing is kept in memory: whoever changes the file locks it, reads it, and replaces it at once. A kill at any
    moment leaves the state before a vote or after it.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file of votes; it need not exist.

        Raises:
            UserError: the folder cannot be written.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise UserError(f"{FLAG} {path}: cannot be written: {error}") from error

    def votes(self) -> list[Comparison]:
        """Every vote of every rater, oldest first.

        Raises:
            UserError: the file is no file of votes; names file and line.
        """
        return [vote for _, vote in self._read()]

    def change(self, edit: Callable[[list[Comparison]], list[Comparison] | None]) -> bool:
        """Changes the votes while nobody else can.

        Args:
            edit: takes the votes and returns what the file shall hold, or None to leave it.

        Returns:
            True if the file was changed.

        Raises:
            UserError: the file cannot be written or holds something else than votes.
        """
        with self._locked():
            votes = edit(self.votes())
            if votes is None:
                return False
            write_rows(self.path, [vote.to_row() for vote in votes])
            return True

    def check(self, pairs: Sequence[Pair], model_a: str, model_b: str) -> None:
        """Makes sure that votes given before are votes on these pairs.

        Args:
            pairs: the pairs that will be asked.
            model_a: name of the first model.
            model_b: name of the second.

        Raises:
            UserError: a row is no person's vote, or one on other responses or models; names file and line.
        """
        known = {pair.id for pair in pairs}
        elsewhere = f"Give another {FLAG}, or the files that these votes are on."
        for origin, vote in self._read():
            if vote.kind != "human":
                raise UserError(f"{origin}: a verdict of kind {vote.kind!r}, not a person's vote. {elsewhere}")
            if vote.id not in known:
                raise UserError(f"{origin}: a vote on responses that the two files do not hold. {elsewhere}")
            if (vote.model_a, vote.model_b) != (model_a, model_b):
                raise UserError(
                    f"{origin}: a vote on {vote.model_a} and {vote.model_b}, and now it is {model_a} and {model_b}. "
                    + elsewhere
                )

    def _read(self) -> list[tuple[str, Comparison]]:
        try:
            if self.path.stat().st_size == 0:
                return []
        except FileNotFoundError:
            return []
        return [(origin, comparison_of(row, origin)) for origin, row in read_rows(self.path, FLAG)]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of the file that is at the path now: each change replaces the file, and the lock with it."""
        while True:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise UserError(f"{FLAG} {self.path}: cannot be written: {error}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self._is_at_path(descriptor):
                    yield
                    return
            finally:
                os.close(descriptor)

    def _is_at_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False
