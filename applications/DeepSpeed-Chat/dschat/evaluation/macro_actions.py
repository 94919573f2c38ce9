# SPDX-License-Identifier: Apache-2.0
"""Responses with coloured macro actions, as an HTML fragment or as text for a terminal.

Each macro action has a colour, from a short palette that repeats; on a page, hovering over a token shows its numbers.
All text is escaped. A page needs `STYLE` once, and `legend_html()` near the spans; pages of reports have both.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from dschat.base.display import pictures

STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
COLOURS = 5  # the classes ma0 … ma4 of the style sheet
# Backgrounds of the 256-colour palette for black text; neighbours differ in lightness, too.
TERMINAL_COLOURS = (153, 223, 115, 182, 229)
RESET = "\x1b[0m"


@dataclass(frozen=True)
class MacroToken:
    """One token of a response; numbers that are not known are None."""

    text: str  # added to the response by the token; special tokens by their name
    macro_action: int  # index of its macro action in the response; -1 for an environment's token
    value: float | None = None  # value of the state before the token, by the critic
    reward: float | None = None  # with the KL penalty
    advantage: float | None = None  # advantage of its macro action


def macro_tokens(rows: Iterable[Mapping[str, Any]]) -> list[MacroToken]:
    """Tokens of a samples file: rows with `text`, `macro_action` (else a KeyError) and, where known, the numbers."""
    tokens = []
    for row in rows:
        token = MacroToken(
            text=str(row["text"]),
            macro_action=int(row["macro_action"]),
            value=row.get("value"),
            reward=row.get("reward"),
            advantage=row.get("advantage"),
        )
        tokens.append(token)
    return tokens


def macro_spans(tokens: Iterable[MacroToken]) -> str:
    """HTML of one response: a span per macro action, in it a span per token.

    Runs of tokens with the same `macro_action` share a span. The text of the element is the text of the tokens, with
    spaces and line breaks, except for control characters: see `pictures`.
    """
    spans = []
    for number, group in groupby(tokens, key=lambda token: token.macro_action):
        members = list(group)
        inner = "".join(_token_span(token, len(members)) for token in members)
        kind = f"ma ma{number % COLOURS}" if number >= 0 else "ma-environment"
        spans.append(f'<span class="{kind}">{inner}</span>')
    return f'<div class="ma-text">{"".join(spans)}</div>'


def legend_html() -> str:
    """HTML of a line that explains the spans."""
    swatches = ""
    for index, word in enumerate(("one", "macro", "action", "each", "colour")):
        swatches += f'<span class="ma ma{index % COLOURS}">&nbsp;{word}&nbsp;</span>'
    return (
        f'<p class="ma-legend">{swatches} A bar and a new colour begin a macro action; the colours repeat.'
        ' <span class="nl"></span> is a line break, <span class="tk-empty"></span> a token without text of its own.'
        " Hover over a token for its macro action and what is known of it.</p>"
    )


def _token_span(token: MacroToken, macro_length: int) -> str:
    text = pictures(token.text)
    length = f"{macro_length} token{'' if macro_length == 1 else 's'}"
    numbers = {"value": token.value, "reward": token.reward, "advantage": token.advantage}
    if token.macro_action < 0:
        facts = [f"token: {text!r}", "of the environment"]
    else:
        facts = [f"token: {text!r}", f"macro action {token.macro_action + 1} ({length})"]
    if token.macro_action >= 0 and any(number is not None for number in numbers.values()):
        facts += [f"{name}: {_number(number)}" for name, number in numbers.items()]
    title = "\n".join(facts)
    body = '<span class="nl">\n</span>'.join(escape(line) for line in text.split("\n"))
    kind = "tk" if token.text else "tk tk-empty"
    return f'<span class="{kind}" title="{escape(title)}">{body}</span>'


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:+.4f}".replace("-", "−")


def macro_text(tokens: Iterable[MacroToken], colour: bool) -> str:
    """Response for a terminal, with its macro actions in colours, or else with a bar at the end of each."""
    parts = []
    for number, group in groupby(tokens, key=lambda token: token.macro_action):
        text = pictures("".join(token.text for token in group))
        text = text.replace("\t", "␉").replace("\n", "↵\n")
        if number < 0:  # an environment's tokens
            parts.append(text)
        elif colour:
            parts.append(_coloured(text, TERMINAL_COLOURS[number % len(TERMINAL_COLOURS)]))
        else:
            parts.append(f"{text}|")
    return "".join(parts)


def _coloured(text: str, background: int) -> str:
    """Text with each line coloured by itself, so that the background does not extend to the edge of the screen."""
    lines = []
    for line in text.split("\n"):
        lines.append(f"\x1b[30;48;5;{background}m{line}{RESET}" if line else "")
    return "\n".join(lines)
