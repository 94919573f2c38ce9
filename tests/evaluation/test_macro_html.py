# SPDX-License-Identifier: Apache-2.0
"""Macro actions as HTML: the text survives, nothing of it becomes markup, one span per macro action and token."""

import pytest

from dschat.evaluation.macro_actions import STYLE, MacroToken, macro_spans
from handmade_runs import Page


def test_one_span_per_macro_action_and_per_token():
    tokens = [MacroToken(text, macro) for text, macro in zip("abcdef", [0, 0, 0, 1, 1, 2], strict=True)]
    page = Page(macro_spans(tokens))
    assert len(page.of_class("tk")) == 6
    assert [attrs["class"] for attrs in page.of_class("ma")] == ["ma ma0", "ma ma1", "ma ma2"]


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '" onmouseover="x', "  two  spaces", "日本 🙂"])
def test_text_round_trips_and_never_becomes_markup(text):
    page = Page(macro_spans([MacroToken("x", 0), MacroToken(text, 1)]))
    assert page.text == "x" + text
    assert {tag for tag, _ in page.elements} == {"div", "span"}
    assert all(set(attrs) <= {"class", "title"} for _, attrs in page.elements)


def test_line_breaks_control_characters_and_tokens_without_text_are_marked():
    page = Page(macro_spans([MacroToken("a\n\nb", 0), MacroToken("", 0)]))
    assert page.text == "a\n\nb"
    assert (len(page.of_class("nl")), len(page.of_class("tk-empty"))) == (2, 1)
    assert "white-space: pre-wrap" in STYLE
    page = Page(macro_spans([MacroToken("a\x00b\x1b[0m\rc\x7f\x85\u202ed", 0)]))
    assert page.text == "a␀b␛[0m␍c␡\ufffd\ufffdd"


UNKNOWN = "token: 'b'\nmacro action 4 (1 token)\nvalue: –\nreward: –\nadvantage: –"
NUMBERS = "\nvalue: +0.5000\nreward: −0.2500\nadvantage: +1.2346"


@pytest.mark.parametrize(
    ("token", "title"),
    [
        (MacroToken(' "hi"\n', 0, 0.5, -0.25, 1.23456), "token: ' \"hi\"\\n'\nmacro action 1 (1 token)" + NUMBERS),
        (MacroToken("b", 3, None, float("nan")), UNKNOWN),
        (MacroToken("b", 3), "token: 'b'\nmacro action 4 (1 token)"),
    ],
)
def test_tooltip_holds_token_and_the_numbers_that_there_are(token, title):
    assert Page(macro_spans([token])).of_class("tk")[0]["title"] == title
    both = Page(macro_spans([token, token])).of_class("tk")[1]["title"]
    assert both == title.replace("(1 token)", "(2 tokens)")
