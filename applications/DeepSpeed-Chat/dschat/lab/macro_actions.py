# SPDX-License-Identifier: Apache-2.0
"""Macro actions drawn as coloured stretches: tokens in, an HTML fragment or text for a terminal out.

One colour per macro action, from a short palette that repeats; on a page, hovering over a token shows its numbers.
Every text is escaped, so a model may write whatever it likes. Pages of reports have `STYLE` and `legend_html()`;
another page needs the former once and the latter near the spans.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from dschat.base.display import pictures

# Tints of the Okabe-Ito colours (fill, edge). Neighbours differ for every common form of colour blindness, and the
# edge on the left marks where a macro action begins without any colour.
PALETTE = (
    ("#cfe8f8", "#0072b2"),
    ("#fbe3b5", "#b37400"),
    ("#c5ebdd", "#00795a"),
    ("#f3d7e7", "#a3467b"),
    ("#f4efb0", "#8a7f00"),
)

# Black on light backgrounds of the 256-colour palette; neighbours differ in lightness, too.
COLOURS = (153, 223, 115, 182, 229)
RESET = "\x1b[0m"

STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8") + "\n".join(
    f".ma{index} {{ background: {fill}; border-left-color: {edge}; }}" for index, (fill, edge) in enumerate(PALETTE)
)


@dataclass(frozen=True)
class MacroToken:
    """One token of a response; numbers that are not known are None."""

    text: str  # what the token adds to the text, special tokens by their name
    macro_action: int  # number of its macro action in the response, from 0
    value: float | None = None  # the critic's, of the state before the token
    reward: float | None = None  # the KL penalty included
    advantage: float | None = None  # of its macro action


def macro_tokens(rows: Iterable[Mapping[str, Any]]) -> list[MacroToken]:
    """The tokens of a samples file: with `text` and `macro_action`, else a KeyError, and, where known, the numbers."""
    names = ("value", "reward", "advantage")
    return [MacroToken(str(row["text"]), int(row["macro_action"]), *map(row.get, names)) for row in rows]


def macro_spans(tokens: Iterable[MacroToken]) -> str:
    """HTML of one response: a span per macro action, in it a span per token.

    Runs of tokens with the same `macro_action` share a span. The text of the element is the text of the tokens, with
    spaces and line breaks, but for characters that would steer the page: see `pictures`.
    """
    spans = []
    for number, group in groupby(tokens, key=lambda token: token.macro_action):
        members = list(group)
        inner = "".join(_token_span(token, len(members)) for token in members)
        spans.append(f'<span class="ma ma{number % len(PALETTE)}">{inner}</span>')
    return f'<div class="ma-text">{"".join(spans)}</div>'


def legend_html(numbers: bool = True) -> str:
    """HTML of a line that explains the spans; `numbers`: the tokens have values, rewards and advantages."""
    swatches = "".join(
        f'<span class="ma ma{index % len(PALETTE)}">&nbsp;{word}&nbsp;</span>'
        for index, word in enumerate(("one", "macro", "action", "each", "colour"))
    )
    return (
        f'<p class="ma-legend">{swatches} A bar and a new colour begin a macro action; the colours repeat.'
        ' <span class="nl"></span> is a line break, <span class="tk-empty"></span> a token without text of its own.'
        f" Hover over a token for {'its value, reward and advantage' if numbers else 'its macro action'}.</p>"
    )


def _token_span(token: MacroToken, macro_length: int) -> str:
    text = pictures(token.text)
    length = f"{macro_length} token{'' if macro_length == 1 else 's'}"
    facts = [f"token: {text!r}", f"macro action {token.macro_action + 1} ({length})"]
    numbers = {"value": token.value, "reward": token.reward, "advantage": token.advantage}
    if any(number is not None for number in numbers.values()):
        facts += [f"{name}: {_number(number)}" for name, number in numbers.items()]
    title = "\n".join(facts)
    body = '<span class="nl">\n</span>'.join(escape(line) for line in text.split("\n"))
    kind = "tk" if token.text else "tk tk-empty"
    return f'<span class="{kind}" title="{escape(title)}">{body}</span>'


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:+.4f}".replace("-", "−")


def macro_text(tokens: Iterable[MacroToken], colour: bool) -> str:
    """A response with its macro actions painted in colours, or else with a bar at the end of each."""
    parts = []
    for number, group in groupby(tokens, key=lambda token: token.macro_action):
        text = pictures("".join(token.text for token in group)).replace("\t", "␉").replace("\n", "↵\n")
        parts.append(_painted(text, COLOURS[number % len(COLOURS)]) if colour else f"{text}|")
    return "".join(parts)


def _painted(text: str, number: int) -> str:
    """Every line by itself, so that the background does not run to the edge of the screen."""
    return "\n".join(f"\x1b[30;48;5;{number}m{line}{RESET}" if line else "" for line in text.split("\n"))
