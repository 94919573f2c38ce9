# SPDX-License-Identifier: Apache-2.0
"""The demos `dschat demo chat` and `dschat demo summary`: a page, or a chat in a terminal, over ssh or in pipes."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from dschat.base.display import HOST, USER, check_address, gradio, visible
from dschat.base.errors import UserError
from dschat.demo.models import find_checkpoints
from dschat.demo.options import PASSWORD, ChatOptions, DemoOptions
from dschat.lab.macro_actions import macro_text
from dschat.settings.commands import require_token

if TYPE_CHECKING:
    from dschat.demo.session import Session, ShownAnswer

logger = logging.getLogger("dschat.demo")

COMMANDS = "/clear forgets the conversation, /load CHECKPOINT another model, /exit ends; Ctrl-C stops an answer."
TITLES = ("model", "other")


def run(options: DemoOptions) -> str:
    """Loads the named models, then serves the page or chats in the terminal; returns an empty last message.

    Flags and paths are checked before a model is loaded.
    """
    in_terminal = isinstance(options, ChatOptions) and options.chat.terminal
    for path in (options.demo.model, options.demo.other):
        if path is not None:
            find_checkpoints(path)
    if not in_terminal:
        check_address(options.demo.host, options.demo.port)
        use = f", which the page asks for with the name {USER}"
        require_token(options.demo.host, PASSWORD, "open any model of this machine", use)
        gradio(f"dschat demo {options.task}")

    from transformers.utils.logging import disable_progress_bar

    from dschat.demo.session import Session

    disable_progress_bar()

    session = Session(options, options.termination, options.task)
    for side in range(options.demo.sides):
        session.load_named(side)
    if in_terminal:
        chat_here(session, options)
        return ""
    return serve_page(session)


def chat_here(session: Session, options: DemoOptions) -> None:
    """Chats in this terminal."""

    def write(text: str) -> None:
        print(text, end="", flush=True)

    def ask() -> str:
        return input("> " if sys.stdin.isatty() else "")

    run_path = options.demo.model or ""
    TerminalChat(session, ask, write, sys.stdout.isatty(), run_path).run()


def serve_page(session: Session) -> str:
    """Serves the page until Ctrl-C."""
    from dschat.demo.page import serve

    page, address = serve(session)
    host = session.options.demo.host
    where = "in a browser on this machine"
    if host != HOST:
        where = "in a browser"
        logger.warning("--host %s: whoever reaches this port may open any model of this machine", host)
    print(f"Open {address} {where}. Ctrl-C ends.", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    page.close(verbose=False)
    return ""


class TerminalChat:
    """A chat in a terminal, until /exit or the end of the input."""

    def __init__(
        self,
        session: Session,
        ask: Callable[[], str],
        write: Callable[[str], None],
        colour: bool,
        run_path: str,
    ) -> None:
        """Takes the session and the two ends of a terminal.

        Args:
            session: with its models loaded.
            ask: returns the next line; EOFError ends the chat.
            write: writes text without a line end.
            colour: paint macro actions.
            run_path: the run whose checkpoints /load knows by name.
        """
        self._session = session
        self._ask = ask
        self._write = write
        self._colour = colour
        self._run_path = run_path
        self._choice, _ = session.choice(session.path(0))
        self._clear()
        self._side = 0  # whose answer is being written
        self._written: str | None = None  # of that answer; None before its beginning

    def run(self) -> None:
        """Answers one message after another. Errors are printed, and the chat goes on."""
        for side in range(self._session.options.demo.sides):
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
            if line.partition(" ")[0] == "/exit":
                return
            try:
                self._handle(line)
            except UserError as error:
                self._say(f"error: {error}")

    def _handle(self, line: str) -> None:
        """Runs a command or answers a message."""
        word, _, argument = line.partition(" ")
        if word == "/load":
            self._load(argument.strip())
        elif word == "/clear":
            self._clear()
            self._say("Forgotten.")
        elif word.startswith("/"):
            self._say(f"There is no {visible(word)}. {COMMANDS}")
        elif line:
            self._answer(line)

    def _clear(self) -> None:
        from dschat.demo.session import Chat

        self._chat = Chat()

    def _load(self, name: str) -> None:
        """Loads a checkpoint by its name in the run or by its path; without a name, lists the checkpoints."""
        checkpoints = find_checkpoints(self._run_path)
        if not name:
            self._say("\n".join(checkpoint.name for checkpoint in checkpoints))
            return
        named = []
        for checkpoint in checkpoints:
            if name in (checkpoint.name, checkpoint.path):
                named.append(checkpoint)
        path = (named or find_checkpoints(name))[0].path
        self._say(self._session.load(0, path))
        self._choice, _ = self._session.choice(path)

    def _answer(self, message: str) -> None:
        """Writes the answer as it grows; two models' answers are written one after the other."""
        stop = threading.Event()
        answers: list[ShownAnswer] = []
        try:
            with _stopped_by_ctrl_c(stop):
                growing = self._session.answer(partial(self._chat.prompt, message), self._choice, stop)
                for answers in growing:
                    self._write_new(answers)
        finally:
            is_incomplete = bool(self._written)  # it has failed
            self._side = 0
            self._written = None
            if is_incomplete:
                self._write("\n")
        self._chat = self._chat.with_turn(message, answers)

    def _write_new(self, answers: Sequence[ShownAnswer]) -> None:
        """Writes the new text of the current answer, and of the next one once that is done."""
        while self._side < len(answers):
            answer = answers[self._side]
            if self._written is None:
                self._written = ""
                if len(answers) == 2:
                    self._say(f"[{TITLES[self._side]}]")
            text = self._printable(answer)
            if text.startswith(self._written):
                self._write(text[len(self._written) :])
                self._written = text
            elif answer.done is not None:  # decoded as a whole, it differs from its pieces
                self._write(f"\n{text}")
            if answer.done is None:
                return
            self._end(answer)
            self._side += 1
            self._written = None

    def _printable(self, answer: ShownAnswer) -> str:
        """The text of an answer without what the next word may change: \\r\\n is shown as one character."""
        text = answer.text.lstrip()
        return visible(text if answer.done else text.removesuffix("\r"))

    def _end(self, answer: ShownAnswer) -> None:
        self._write("\n")
        if self._session.options.demo.sides == 2 and answer.tokens:
            self._say(macro_text(answer.tokens, self._colour))
        self._say(f"[{answer.caption}]")

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
