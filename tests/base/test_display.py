# SPDX-License-Identifier: Apache-2.0
"""What stands on a screen: a redirected bar is a line a minute; of model text every character is shown."""

import io
import re
import sys

import pytest

from dschat.base import progress as module
from dschat.base.display import visible, wrapped
from dschat.base.errors import UserError
from dschat.base.progress import progress
from dschat.base.web_page import launch
from dschat.demo.command import run as run_demo
from dschat.demo.options import ChatOptions


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture()
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the lines go by, in a list so that a test can change them."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def counted(text: str) -> list[str]:
    return re.findall(r"^rows: \d+% \((\d+/\d+)\)", text, re.MULTILINE)


def test_a_line_after_every_minute_and_one_at_the_end(clock, capsys) -> None:
    with progress(10, "rows") as bar:
        for second in range(10):
            clock[0] = 25.0 * second
            bar.update()
            bar.set_postfix(loss=second)
    text = capsys.readouterr().err
    # Drawings at 75 s (60 after the start), 150 s (75 after that line) and 225 s, which is the end, too.
    assert counted(text) == ["4/10", "7/10", "10/10"]
    assert "\r" not in text and text.count("\n") == 3


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress(desc="rows", iterable=[1, 2])) == [1, 2]
    assert "\r" in stream.getvalue() and "2/2" in stream.getvalue()


def test_a_bar_of_less_than_a_minute_says_nothing_and_the_end_of_a_longer_one_is_said(clock, capsys) -> None:
    for seconds, lines in ((30.0, []), (61.0, ["1/3", "3/3"])):
        with progress(3, "rows") as bar:
            bar.update()
            clock[0] += seconds
            bar.refresh()
            bar.update(2)
        assert counted(capsys.readouterr().err) == lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("over\rwritten\x08\x7f", "over\\x0dwritten\\x08\\x7f"),
        ("\x9b2J", "\\x9b2J"),  # the one-byte form of escape [
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\ud800 \u2028", "\\ud800 \\u2028"),
        ("naïve 猫 👩‍👩‍👧", "naïve 猫 👩‍👩‍👧"),
    ],
)
def test_no_character_is_obeyed(text, expected):
    assert visible(text) == expected


class Page:
    """A page that notes how it is served, or finds no port."""

    def __init__(self, has_port: bool) -> None:
        pytest.importorskip("gradio")
        self.has_port = has_port

    def launch(self, **options):
        self.options = options
        if not self.has_port:
            raise OSError("Cannot find empty port in range: 9000-9001. You can give another one to `launch()`.")
        return None, "http://127.0.0.1:7860", None


@pytest.mark.parametrize(("password", "asked"), [("secret", [("demo", "secret")]), (None, None), ("", None)])
def test_a_page_asks_for_its_password_and_takes_no_large_file(password, asked):
    page = Page(has_port=True)
    assert launch(page, "", password=password) == "http://127.0.0.1:7860"
    served = page.options
    assert served["auth"] == asked and served["max_file_size"] == 1 << 20 and served["share"] is False


@pytest.mark.parametrize(("port", "asked"), [(8000, 8000), (0, None)])  # 0: any free one
def test_a_page_without_a_port_says_what_gradio_found(port, asked):
    page = Page(has_port=False)
    message = "--port: Cannot find empty port in range: 9000-9001; give another one."
    with pytest.raises(UserError, match=f"^{message}$"):
        launch(page, "", port=port)
    assert page.options["server_port"] == asked


def test_a_demo_on_another_address_needs_a_password(monkeypatch):
    monkeypatch.delenv("DEMO_PASSWORD", raising=False)
    with pytest.raises(UserError, match=r"--host 0.0.0.0: anyone .* Set DEMO_PASSWORD to a secret, which the page"):
        run_demo(ChatOptions(model="m", host="0.0.0.0"))


def test_lines_are_broken_between_words_and_keep_their_ends():
    text = "one two three\n\n    four five\n" + "x" * 12
    assert wrapped(text, 9) == "one two\nthree\n\n    four\nfive\n" + "x" * 12
