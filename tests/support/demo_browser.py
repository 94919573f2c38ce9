# SPDX-License-Identifier: Apache-2.0
"""The server of the demo's page, and hands and eyes for it in a browser."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli_runs import environment

TIMEOUT = 60_000  # milliseconds
IDLE = "() => !document.querySelector('#demo-submit').disabled && document.querySelector('#demo-stop').disabled"


class Server:
    """The process that serves the page."""

    def __init__(self, folder: Path, task: str, *flags: Any) -> None:
        self.log = folder / "log.txt"
        command = [sys.executable, "-m", "dschat", "demo", task, "--device", "cpu", *map(str, flags)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=open(self.log, "w"),
            text=True,
            env=environment(PYTHONWARNINGS=None),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"Open (http://127\.0\.0\.1:\d+/) in a browser on this machine", line)
        assert found, line + self.log.read_text()
        self.address = found[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def opened(chromium: Any, address: str, **options: Any) -> Iterator[Any]:
    """A fresh browser profile on the page; nothing on it may fail, and it may ask no other host."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    errors: list[str] = []
    hosts: set[str] = set()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]) if "://" in request.url else None)
    page.goto(address)
    page.locator("#demo-submit").wait_for()
    try:
        yield page
        assert errors == [] and hosts == {address.split("/")[2]}
    finally:
        context.close()


def box(page: Any, name: str) -> Any:
    """A box to type into."""
    return page.locator(f"#demo-{name} textarea, #demo-{name} input").first


def status(page: Any, words: str, side: str = "model") -> None:
    """Waits until a status line says so."""
    page.locator(f"#demo-{side}-status", has_text=re.compile(words)).wait_for()


def say(page: Any, message: str) -> None:
    """Types a message and submits it."""
    box(page, "message").fill(message)
    page.locator("#demo-submit").click()


def captions(page: Any, count: int) -> Any:
    """Waits until so many answers are whole; what stands under them."""
    page.wait_for_function(f"() => document.querySelectorAll('.demo-caption').length === {count}")
    page.wait_for_function(IDLE)
    return page.locator(".demo-caption").all_inner_texts()


def bubbles(page: Any, side: int = 0) -> list[str]:
    """What was said in a chat: messages and answers in turn, without what stands under them."""
    return [text.strip() for text in page.locator(f"#demo-chat-{side} .message-content").all_inner_texts()]
