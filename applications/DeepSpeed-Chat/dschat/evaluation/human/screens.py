# SPDX-License-Identifier: Apache-2.0
"""What the page answers to the browser, without the page.

The browser keeps nothing that matters. Each vote comes with the rater's name and the item that was shown, and undo
with the vote that was the last; the session decides whether that still holds. So two tabs, a double click, a reload
and a new server on the same port do no harm.
"""

import threading
from dataclasses import dataclass

from dschat.errors import UserError
from dschat.evaluation.human.session import LONGEST_NAME, HumanSession, Study, View, rater_name

NAME_NEEDED = f"Give a name of 1 to {LONGEST_NAME} characters."
NOT_COUNTED = "That vote did not count: the item had your vote already, from another tab or a second click."
UNDONE = "Taken back. This was your last vote."
NOT_UNDONE = "Nothing was taken back: you have voted in another tab since."


@dataclass(frozen=True)
class Screen:
    """What to show."""

    rater: str  # whose screen it is; empty asks for the name
    view: View | None  # None leaves everything as it is, but for the note
    note: str = ""
    comment: str = ""  # content of the comment box


class Screens:
    """Answers the browsers of all raters; may be called by several threads."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._sessions: dict[str, HumanSession] = {}
        self._lock = threading.Lock()

    def enter(self, asked: bool, rater: str) -> Screen:
        """A rater comes, or comes back; `asked` if the name was typed, so that a bad one is worth a note."""
        try:
            rater_name(rater)
        except UserError:
            return Screen("", None, NAME_NEEDED if asked else "")
        try:
            session = self._session(rater)
            return Screen(session.rater, session.view())
        except UserError as error:
            return Screen("", None, str(error))

    def vote(self, choice: str, rater: str, item_id: str, comment: str) -> Screen:
        """A vote, one of CHOICES, on the item that was shown."""
        try:
            session = self._session(rater)
            saved = session.vote(item_id, choice, comment)
            return Screen(rater, session.view(), "" if saved else NOT_COUNTED)
        except UserError as error:
            return Screen(rater, None, f"Not saved! {error}")

    def undo(self, rater: str, last: str) -> Screen:
        """Takes back what was the last vote when the screen was made; its comment returns to the box."""
        try:
            session = self._session(rater)
            taken = session.undo(last)
            if taken is None:
                return Screen(rater, session.view(), NOT_UNDONE)
            return Screen(rater, session.view(taken.id), UNDONE, str(taken.details.get("comment") or ""))
        except UserError as error:
            return Screen(rater, None, f"Not taken back! {error}")

    def _session(self, rater: str) -> HumanSession:
        """The session of a rater, the same for all tabs."""
        name = rater_name(rater).casefold()
        with self._lock:
            if name not in self._sessions:
                self._sessions[name] = self._study.session(rater)
            return self._sessions[name]
