# SPDX-License-Identifier: Apache-2.0
"""The file of votes: every vote is on the disk before the next question, and several raters may write at a time."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from dschat.common.journal import make_writable
from dschat.common.jsonl import read_rows, write_rows
from dschat.common.lock import Lock
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
        """Opens the file of votes, which need not exist; raises UserError where its folder cannot be written."""
        self.path = path
        make_writable(path.parent, f"{FLAG} {path}")

    def votes(self) -> list[Comparison]:
        """Every vote of every rater, oldest first; raises UserError, with the line, where a row is no vote."""
        return [vote for _, vote in self._read()]

    @contextmanager
    def changed(self) -> Iterator[list[Comparison]]:
        """The votes, which nobody else can change meanwhile; what was done to the list is written at the end."""
        with closing(Lock(self.path.with_name(f".{self.path.name}.lock"), f"{FLAG} {self.path}", waits=True)):
            votes = self.votes()
            before = list(votes)
            yield votes
            if votes != before:
                write_rows(self.path, [vote.to_row() for vote in votes])

    def check(self, pairs: Sequence[Pair], models: tuple[str, str]) -> None:
        """Raises UserError, with file and line, unless all rows are people's votes on these pairs of these models."""
        known = {pair.id for pair in pairs}
        for origin, vote in self._read():
            problem = None
            if vote.kind != "human":
                problem = f"a verdict of kind {vote.kind!r}, not a person's vote"
            elif vote.id not in known:
                problem = "a vote on responses that the two files do not hold"
            elif (vote.model_a, vote.model_b) != models:
                problem = f"a vote on {vote.model_a} and {vote.model_b}, and now it is {' and '.join(models)}"
            if problem:
                raise UserError(f"{origin}: {problem}. Give another {FLAG}, or the files that these votes are on.")

    def _read(self) -> list[tuple[str, Comparison]]:
        if not self.path.exists() or self.path.stat().st_size == 0:
            return []
        return [(origin, comparison_of(row, origin)) for origin, row in read_rows(self.path, FLAG)]
