# SPDX-License-Identifier: Apache-2.0
"""Macro actions in a terminal: coloured stretches, or, where there are no colours, bars between them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from dschat.common.hidden_text import is_hidden
from dschat.macro_view.html import MacroToken

# Black on light backgrounds of the 256-colour palette; neighbours differ in lightness, too.
COLOURS = (153, 223, 115, 182, 229)
RESET = "\x1b[0m"
MARKS = "\u200e\u200f"  # of a direction, without a width


def macro_text(tokens: Iterable[MacroToken], colour: bool) -> str:
    """A response with its macro actions marked.

    Args:
        tokens: of the response, in order.
        colour: paint macro actions; otherwise a bar ends each.
    """
    parts = []
    for number, group in groupby(tokens, key=lambda token: token.macro_action):
        text = "".join(_visible(token.text) for token in group)
        parts.append(_painted(text, COLOURS[number % len(COLOURS)]) if colour else f"{text}|")
    return "".join(parts)


def _painted(text: str, number: int) -> str:
    """Every line by itself, so that the background does not run to the edge of the screen."""
    return "\n".join(f"\x1b[30;48;5;{number}m{line}{RESET}" if line else "" for line in text.split("\n"))


def _visible(text: str) -> str:
    """Control characters by their pictures: a model's text must not steer the terminal. Line breaks stay, marked."""
    shown = []
    for character in text:
        code = ord(character)
        if character == "\n":
            shown.append("↵\n")
        elif code < 0x20 or code == 0x7F:
            shown.append(chr(0x2400 + code) if code < 0x20 else "␡")
        elif is_hidden(character) or character in MARKS:
            shown.append("\ufffd")
        else:
            shown.append(character)
    return "".join(shown)
