# SPDX-License-Identifier: Apache-2.0
"""The commands `dschat demo chat` and `dschat demo summary`: a page in a browser, or a chat in the terminal."""

import logging
import os
import threading

from dschat.base.web_page import HOST, USER, check_address, import_gradio, launch
from dschat.demo.options import PASSWORD, ChatOptions, DemoOptions
from dschat.settings.commands import require_token

logger = logging.getLogger("dschat.demo")


def run(options: DemoOptions) -> str:
    """Loads the models, then serves the page or chats in the terminal; returns an empty last message.

    The page's address and password are checked before a model is loaded.
    """
    demo = options.demo
    in_terminal = isinstance(options, ChatOptions) and options.chat.terminal
    if not in_terminal:
        check_address(demo.host, demo.port)
        where_given = f", which the page asks for with the name {USER}"
        require_token(demo.host, PASSWORD, "talk to this model", where_given)
        import_gradio(f"dschat demo {options.task}")

    # Imported here, because transformers takes seconds to import.
    from dschat.demo.session import Session

    session = Session(options)
    if in_terminal:
        from dschat.demo.terminal import chat_in_terminal

        chat_in_terminal(session)
        return ""

    from dschat.demo.page import PAGE_STYLE, build

    page = build(session, options.task)
    address = launch(page, PAGE_STYLE, port=demo.port, host=demo.host, password=os.environ.get(PASSWORD))
    where = "in a browser on this machine" if demo.host == HOST else "in a browser"
    print(f"Open {address} {where}. Ctrl-C ends.", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print()
    page.close(verbose=False)
    return ""
