# SPDX-License-Identifier: Apache-2.0
"""A server of the page of `dschat vote --web`, and functions that vote on it in a browser."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli_runs import environment
from vote_runs import command

TIMEOUT = 60_000  # milliseconds
PAUSE = 330  # milliseconds; a vote that comes sooner after another counts as a double click
# Nobody has to wait that long: by the page's clock there is a second between any two looks at it.
SLOW_HANDS = "let seconds = 0; performance.now = () => 1000 * ++seconds;"
# What is shown is what the next vote will be on.
ITEM_ARRIVED = """() => (document.querySelector('.human-item')?.dataset.item ?? '')
    === document.querySelector('#human-item input, #human-item textarea').value"""


class Server:
    """The process that serves the page. Its proxies are a trap."""

    def __init__(self, folder: Path, trap: int) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        proxy = f"http://127.0.0.1:{trap}"
        variables = {name: proxy for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")}
        self.process = subprocess.Popen(
            command(folder, "--web", "--dataset", "tldr"),
            stdout=subprocess.PIPE,
            stderr=open(self.log, "w"),
            text=True,
            env=environment(HF_HUB_OFFLINE=None, PYTHONWARNINGS=None, **variables),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"Open (http://127\.0\.0\.1:\d+/) in a browser", line)
        assert found, line + self.log.read_text()
        self.address = found[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def opened(chromium: Any, address: str, rater: str | None = None) -> Iterator[Any]:
    """A fresh browser profile on the page; with a rater, who typed the name."""
    context = chromium.new_context()
    context.set_default_timeout(TIMEOUT)
    context.add_init_script(SLOW_HANDS)
    page = context.new_page()
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.goto(address)
    if rater:
        page.locator("#human-name input, #human-name textarea").fill(rater)
        page.locator("#human-start").click()
        page.locator(".human-place").wait_for()
    try:
        yield page
        assert page.errors == []
    finally:
        context.close()


def at(page: Any, place: str) -> Any:
    """Waits until the page shows "2 of 5"; what it shows then as [prompt, first response, second response]."""
    page.locator(".human-place", has_text=re.compile(f"^{place}$")).wait_for()
    page.wait_for_function(ITEM_ARRIVED)
    return page.locator(".human-item pre").all_inner_texts()


def press(page: Any, key: str, place: str) -> Any:
    """A key, and the place it leads to."""
    page.keyboard.press(key)
    return at(page, place)


def click(page: Any, key: str, place: str) -> Any:
    """A click on the button of a key, and the place it leads to."""
    page.locator(f".human-key-{key}:visible").click()
    return at(page, place)


def comment_box(page: Any) -> Any:
    return page.locator("#human-comment input, #human-comment textarea")
