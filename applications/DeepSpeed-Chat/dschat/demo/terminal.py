# SPDX-License-Identifier: Apache-2.0
"""A chat in a terminal, over ssh or in pipes."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from dschat.common.display import visible
from dschat.demo.chats import Conversation
from dschat.demo.checkpoints import find_checkpoints
from dschat.demo.session import Reply, Session
from dschat.errors import UserError
from dschat.macro_view.html import macro_text

COMMANDS = "/clear forgets the conversation, /load CHECKPOINT another model, /exit ends; Ctrl-C stops an answer."
TITLES = ("model", "other")


class TerminalChat:
    """Asks and answers until /exit or the input's end."""

    def __init__(
        self, session: Session, ask: Callable[[], str], write: Callable[[str], None], colour: bool, place: str
    ) -> None:
        """Takes the session and the two ends of a terminal.

        Args:
            session: with its models loaded.
            ask: gives the next line; EOFError ends the chat.
            write: writes text as it is, without a line end.
            colour: paint macro actions.
            place: the run whose checkpoints /load knows by name.
        """
        self._session, self._ask, self._write, self._colour, self._place = session, ask, write, colour, place
        self._conversation = Conversation()
        self._choice, _ = session.choice(session.path(0))
        self._said: str | None = None  # of the answer that is being written; None before its beginning
        self._side = 0  # whose that is

    def run(self) -> None:
        """Asks message after message. Errors are said, and the chat goes on."""
        for side in range(self._session.options.sides):
            self._say(self._session.status(side))
        self._say(COMMANDS)
        while True:
            try:
                line = self._ask().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._say("\n/exit ends the chat.")
                continue
            word, _, rest = line.partition(" ")
            if word == "/exit":
                return
            try:
                if word == "/load":
                    self._load(rest.strip())
                elif word == "/clear":
                    self._conversation = Conversation()
                    self._say("Forgotten.")
                elif word.startswith("/"):
                    self._say(f"There is no {visible(word)}. {COMMANDS}")
                elif line:
                    self._answer(line)
            except UserError as error:
                self._say(f"error: {error}")

    def _load(self, name: str) -> None:
        """A checkpoint by its name in the run, or by its path; without one, says which there are."""
        found = find_checkpoints(self._place)
        if not name:
            self._say("\n".join(one.name for one in found))
            return
        path = next((one.path for one in found if name in (one.name, one.path)), None)
        if path is None:
            path = find_checkpoints(name)[0].path
        self._say(self._session.load(0, path))
        self._choice, _ = self._session.choice(path)

    def _answer(self, message: str) -> None:
        """Writes the answer as it grows; where two models answer, one after the other."""
        stop = threading.Event()
        replies: list[Reply] = []
        try:
            with _stopped_by_ctrl_c(stop):
                growing = self._session.answer(partial(self._conversation.prompt, message), self._choice, stop)
                for replies in growing:
                    self._write_on(replies)
        finally:
            half_said = bool(self._said)  # it has failed
            self._side, self._said = 0, None
            if half_said:
                self._write("\n")
        self._conversation = self._conversation.with_turn(message, replies)

    def _write_on(self, replies: Sequence[Reply]) -> None:
        """Writes what is new of the answer that is being written, and of the next one once that is done."""
        while self._side < len(replies):
            reply = replies[self._side]
            if self._said is None:
                self._said = ""
                if len(replies) == 2:
                    self._say(f"[{TITLES[self._side]}]")
            text = self._shown(reply)
            if text.startswith(self._said):
                self._write(text[len(self._said) :])
                self._said = text
            if reply.done is None:
                return
            self._end(reply)
            self._side, self._said = self._side + 1, None

    def _shown(self, reply: Reply) -> str:
        """The answer without what the next token may change: a line end of Windows is one character."""
        text = reply.text.lstrip()
        return visible(text if reply.done else text.removesuffix("\r"))

    def _end(self, reply: Reply) -> None:
        self._write("\n")
        if self._session.options.sides == 2 and reply.tokens:
            self._say(macro_text(reply.tokens, self._colour))
        self._say(f"[{reply.caption}]")

    def _say(self, line: str) -> None:
        self._write(f"{line}\n")


@contextmanager
def _stopped_by_ctrl_c(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C sets the event instead of ending the program."""
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
