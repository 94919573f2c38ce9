# SPDX-License-Identifier: Apache-2.0
"""A chat in a terminal, which works over ssh and in pipes, too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from dschat.base.display import visible
from dschat.base.errors import UserError
from dschat.demo.models import find_models, select_model
from dschat.demo.session import Session, ShownAnswer
from dschat.evaluation.macro_actions import macro_text

COMMANDS = (
    "/clear starts a new conversation, /load CHECKPOINT loads another model, /exit ends the chat; Ctrl-C stops an"
    " answer."
)
TITLES = ("model", "other")  # headings of the answers of two models, named like the flags


class TerminalChat:
    """A chat with one model, or with two that answer one after the other."""

    def __init__(
        self, session: Session, read_line: Callable[[], str], write: Callable[[str], None], colour: bool, run_path: str
    ) -> None:
        """Starts a new conversation.

        Args:
            session: the session, with its models loaded.
            read_line: returns the next line that the user types; EOFError ends the chat.
            write: prints text without adding a line end.
            colour: show macro actions in colours.
            run_path: the run whose models /load knows by name.
        """
        self._session = session
        self._read_line = read_line
        self._write = write
        self._colour = colour
        self._run_path = run_path
        self._choice, _ = session.choice(session.path(0))
        self._chat = session.new_chat()
        # The answer that is being printed: the number of its model, and its text so far (None: nothing yet, not even
        # its heading).
        self._side = 0
        self._printed: str | None = None

    def run(self) -> None:
        """Answers one message after another. Errors are printed, and the chat continues."""
        for side in range(self._session.options.demo.sides):
            self._write_line(self._session.status(side))
        self._write_line(COMMANDS)
        while True:
            try:
                line = self._read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._write_line("\n/exit ends the chat.")
                continue
            if line.partition(" ")[0] == "/exit":
                return
            try:
                self._handle(line)
            except UserError as error:
                self._write_line(f"error: {error}")

    def _handle(self, line: str) -> None:
        """Runs a command, or answers a message."""
        word, _, argument = line.partition(" ")
        if word == "/load":
            self._load(argument.strip())
        elif word == "/clear":
            self._chat = self._session.new_chat()
            self._write_line("New conversation.")
        elif word.startswith("/"):
            self._write_line(f"There is no command {visible(word)}. {COMMANDS}")
        elif line:
            self._answer(line)

    def _load(self, name: str) -> None:
        """Loads a model by its name in the run or by its path; without a name, lists the run's models."""
        models = find_models(self._run_path)
        if not name:
            self._write_line("\n".join(model.name for model in models))
            return
        matching = []
        for model in models:
            if name in (model.name, model.path):
                matching.append(model)
        selected = matching[0] if matching else select_model(find_models(name), name)
        self._write_line(self._session.load(0, selected.path))
        self._choice, _ = self._session.choice(selected.path)

    def _answer(self, message: str) -> None:
        """Prints the answer while it is generated, and adds it to the conversation."""
        stop = threading.Event()
        answers: list[ShownAnswer] = []
        try:
            with _stopped_by_ctrl_c(stop):
                for answers in self._session.answer(partial(self._chat.prompt, message), self._choice, stop):
                    self._print_new_text(answers)
        finally:
            # An answer that failed half-way leaves an incomplete line.
            is_incomplete = bool(self._printed)
            self._side = 0
            self._printed = None
            if is_incomplete:
                self._write("\n")
        self._chat = self._chat.with_turn(message, answers)

    def _print_new_text(self, answers: Sequence[ShownAnswer]) -> None:
        """Prints the text that the current answer has gained; when it is finished, continues with the next answer.

        Args:
            answers: one answer per model, as far as they are generated.
        """
        while self._side < len(answers):
            answer = answers[self._side]
            if self._printed is None:
                self._printed = ""
                if len(answers) == 2:
                    self._write_line(f"[{TITLES[self._side]}]")
            text = _printable_text(answer)
            if text.startswith(self._printed):
                self._write(text[len(self._printed) :])
                self._printed = text
            elif answer.done is not None:
                # The finished answer, decoded as a whole, differs from the pieces that were printed.
                self._write(f"\n{text}")
            if answer.done is None:
                return
            self._print_end(answer)
            self._side += 1
            self._printed = None

    def _print_end(self, answer: ShownAnswer) -> None:
        """Prints what follows an answer: with two models its macro actions, then its caption."""
        self._write("\n")
        if self._session.options.demo.sides == 2 and answer.tokens:
            self._write_line(macro_text(answer.tokens, self._colour))
        self._write_line(f"[{answer.caption}]")

    def _write_line(self, line: str) -> None:
        self._write(f"{line}\n")


def _printable_text(answer: ShownAnswer) -> str:
    """The text of an answer as far as the next token cannot change how it is shown.

    A trailing carriage return is held back, because \\r\\n is shown as one line end.
    """
    text = answer.text.lstrip()
    return visible(text if answer.done else text.removesuffix("\r"))


@contextmanager
def _stopped_by_ctrl_c(stop: threading.Event) -> Iterator[None]:
    """Context in which Ctrl-C sets an event instead of ending the program."""
    earlier_handler = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier_handler)
