# SPDX-License-Identifier: Apache-2.0
"""Macro actions in a terminal: coloured stretches, or, where there are no colours, bars between them."""

from collections.abc import Iterable
from itertools import groupby

from dschat.common.display import pictures
from dschat.macro_view.html import MacroToken

# Black on light backgrounds of the 256-colour palette; neighbours differ in lightness, too.
COLOURS = (153, 223, 115, 182, 229)
RESET = "\x1b[0m"


def macro_text(tokens: Iterable[MacroToken], colour: bool) -> str:
    """A response with its macro actions marked.

    Args:
        tokens: of the response, in order.
        colour: paint macro actions; otherwise a bar ends each.
    """
    parts = []
    for number, group in groupby(tokens, key=lambda token: token.macro_action):
        text = pictures("".join(token.text for token in group)).replace("\t", "␉").replace("\n", "↵\n")
        parts.append(_painted(text, COLOURS[number % len(COLOURS)]) if colour else f"{text}|")
    return "".join(parts)


def _painted(text: str, number: int) -> str:
    """Every line by itself, so that the background does not run to the edge of the screen."""
    return "\n".join(f"\x1b[30;48;5;{number}m{line}{RESET}" if line else "" for line in text.split("\n"))
