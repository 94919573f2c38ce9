# SPDX-License-Identifier: Apache-2.0
"""The commands `dschat demo chat` and `dschat demo summary`: a page in a browser, or a chat in the terminal."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING

from dschat.base.web_page import HOST, USER, check_address, gradio
from dschat.demo.models import find_models
from dschat.demo.options import PASSWORD, ChatOptions, DemoOptions
from dschat.settings.commands import require_token

if TYPE_CHECKING:
    from dschat.demo.session import Session

logger = logging.getLogger("dschat.demo")


def run(options: DemoOptions) -> str:
    """Loads the models, then serves the page or chats in the terminal; returns an empty last message.

    Flags and paths are checked before a model is loaded.
    """
    in_terminal = isinstance(options, ChatOptions) and options.chat.terminal
    for path in (options.demo.model, options.demo.other):
        if path is not None:
            find_models(path)
    if not in_terminal:
        check_address(options.demo.host, options.demo.port)
        where_given = f", which the page asks for with the name {USER}"
        require_token(options.demo.host, PASSWORD, "open any model of this machine", where_given)
        gradio(f"dschat demo {options.task}")

    # Imported here, because transformers takes seconds to import.
    from transformers.utils.logging import disable_progress_bar

    from dschat.demo.session import Session

    disable_progress_bar()
    session = Session(options, options.termination, options.task)
    for side in range(options.demo.sides):
        session.load_named(side)

    if in_terminal:
        chat_in_terminal(session, options.demo.model or "")
    else:
        serve_page(session)
    return ""


def chat_in_terminal(session: Session, run_path: str) -> None:
    """Chats on standard input and output, until /exit or the end of the input.

    Args:
        session: the session, with its models loaded.
        run_path: the run whose models /load knows by name.
    """
    from dschat.demo.terminal import TerminalChat

    def write(text: str) -> None:
        print(text, end="", flush=True)

    def read_line() -> str:
        return input("> " if sys.stdin.isatty() else "")

    TerminalChat(session, read_line, write, sys.stdout.isatty(), run_path).run()


def serve_page(session: Session) -> None:
    """Serves the page until Ctrl-C."""
    from dschat.demo.page import serve

    page, address = serve(session)
    host = session.options.demo.host
    where = "in a browser on this machine"
    if host != HOST:
        where = "in a browser"
        logger.warning("--host %s: anyone who can reach this port can open any model of this machine", host)
    print(f"Open {address} {where}. Ctrl-C ends.", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    page.close(verbose=False)
