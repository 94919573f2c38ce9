# SPDX-License-Identifier: Apache-2.0
"""A chat in a terminal, which works over ssh and in pipes, too."""

import sys
from collections.abc import Sequence

from dschat.base.display import visible
from dschat.base.errors import UserError
from dschat.demo.models import GrowingAnswer
from dschat.demo.session import Session, Turn, Turns
from dschat.evaluation.macro_actions import macro_text

COMMANDS = "/clear starts a new conversation, /exit or Ctrl-D ends the chat, Ctrl-C stops an answer."


def chat_in_terminal(session: Session) -> None:
    """Answers one line after another, until /exit or the end of the input. After an error the chat goes on."""
    for model in session.models:
        print(model.status)
    print(COMMANDS, flush=True)
    turns: Turns = ()
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        if line == "/clear":
            turns = ()
            print("New conversation.", flush=True)
        elif line:
            turns = (*turns, Turn(line, _answer(session, turns, line)))


def _answer(session: Session, turns: Turns, message: str) -> tuple[GrowingAnswer, ...]:
    """Prints the answers while they are generated, one model after the other; none if they cannot be given."""
    printed = [""] * len(session.models)  # of each answer
    answers: Sequence[GrowingAnswer] = ()
    try:
        for answers in session.chat(turns, message, session.sampling):
            for side, draft in enumerate(answers):
                _print_new(session, side, draft, printed)
    except KeyboardInterrupt:
        print("\n[stopped]", flush=True)
    except UserError as error:
        print(f"\nerror: {error}" if any(printed) else f"error: {error}", flush=True)
        return ()
    return tuple(answers)


def _print_new(session: Session, side: int, answer: GrowingAnswer, printed: list[str]) -> None:
    """Prints what one model's answer has gained, and behind a finished one its macro actions and caption."""
    text = visible(answer.text.lstrip()) + (f"\n[{answer.caption}]\n" if answer.done else "")
    if text == printed[side]:
        return
    if not printed[side] and len(session.models) > 1:
        print(f"[{visible(session.models[side].name)}]")
    is_grown = text.startswith(printed[side])  # a whole answer may differ from the pieces that were printed
    print(text.removeprefix(printed[side]) if is_grown else f"\n{text}", end="", flush=True)
    if answer.done and sys.stdout.isatty():
        print(macro_text(answer.tokens, colour=True))
    printed[side] = text
