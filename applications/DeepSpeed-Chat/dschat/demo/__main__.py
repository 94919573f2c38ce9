# SPDX-License-Identifier: Apache-2.0
"""`python -m dschat.demo chat --model PATH`, `python -m dschat.demo summary --model PATH`; --help says the rest."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING

from dschat.common.display import HOST, check_address, gradio
from dschat.common.script import run_script
from dschat.demo.checkpoints import find_checkpoints
from dschat.demo.options import DemoOptions, parse_options

if TYPE_CHECKING:
    from dschat.demo.session import Session

logger = logging.getLogger("dschat.demo")


def run() -> str:
    """Loads what is named, then serves the page or chats; returns what is left to say.

    What cannot work is refused before anything slow is imported.
    """
    task, options, termination = parse_options(sys.argv[1:])
    for place in filter(None, (options.model, options.other)):
        find_checkpoints(place)
    if not options.terminal:
        check_address(options.host, options.port)
        gradio(f"python -m dschat.demo {task}")

    from transformers.utils.logging import disable_progress_bar

    from dschat.demo.session import Session  # imports torch, which --help does not need

    disable_progress_bar()

    session = Session(options, termination, task)
    for side in range(options.sides):
        session.load_named(side)
    if options.terminal:
        chat_here(session, options)
        return ""
    return serve_page(session)


def chat_here(session: Session, options: DemoOptions) -> None:
    """Chats in this terminal."""
    from dschat.demo.terminal import TerminalChat

    def write(text: str) -> None:
        print(text, end="", flush=True)

    def ask() -> str:
        return input("> " if sys.stdin.isatty() else "")

    TerminalChat(session, ask, write, sys.stdout.isatty(), options.model or "").run()


def serve_page(session: Session) -> str:
    """Serves the page until Ctrl-C."""
    from dschat.demo.page import serve

    page, address = serve(session)
    where = "in a browser on this machine"
    if session.options.host != HOST:
        where = "in a browser"
        logger.warning("--host %s: whoever reaches this port may open any model of this machine", session.options.host)
    print(f"Open {address} {where}. Ctrl-C ends.", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    page.close(verbose=False)
    return ""


if __name__ == "__main__":
    sys.exit(run_script(run, print))
