# SPDX-License-Identifier: Apache-2.0
"""Text shown to people: control characters made harmless, lines wrapped, and tables for terminals and Markdown."""

import textwrap
import unicodedata
from collections.abc import Sequence

EMPTY = "(empty)"
# Unicode categories of characters that control a terminal or break its lines: control characters, lone surrogates,
# line and paragraph separators.
HIDDEN_CATEGORIES = ("Cc", "Cs", "Zl", "Zp")
# Characters that change the direction of the text after them (Unicode's bidirectional formatting).
DIRECTION_CHARACTERS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: str) -> str:
    r"""Text with control characters spelled out: an escape becomes the four characters ``\x1b``.

    Line ends and tabs stay; Windows line ends become plain ones.
    """
    text = text.replace("\r\n", "\n")
    return "".join(_escape_code(char) if is_hidden(char) else char for char in text)


def pictures(text: str) -> str:
    """Text in which every control character is one visible character; line ends and tabs stay.

    A control character becomes its Unicode picture (an escape becomes ␛), or U+FFFD if it has none.
    """
    return "".join(_picture(char) if is_hidden(char) else char for char in text)


def for_reading(text: str) -> str:
    """Prompt or response as a rater sees it: `visible`, without surrounding white space; EMPTY if nothing is left."""
    return visible(text).strip() or EMPTY


def wrapped(text: str, width: int) -> str:
    """Text in lines of at most `width` characters, broken between words; existing line ends and indents stay."""
    wrapper = textwrap.TextWrapper(
        width=width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def is_hidden(char: str) -> bool:
    """Whether a character would control the terminal instead of being shown; line ends and tabs do not count."""
    if char in "\n\t":
        return False
    return char in DIRECTION_CHARACTERS or unicodedata.category(char) in HIDDEN_CATEGORIES


def _escape_code(char: str) -> str:
    """A character as Python escapes it, such as \\x1b."""
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def _picture(char: str) -> str:
    """The Unicode picture of a control character; U+FFFD for other characters."""
    if char < " ":
        return chr(0x2400 + ord(char))
    return "␡" if char == "\x7f" else "\ufffd"


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table for a terminal: the first column is left-aligned, the others are right-aligned."""
    table = _padded([headers, *rows])
    lines = ["  ".join(row).rstrip() for row in table]
    lines.insert(1, "-" * text_width(lines[0]))
    return "\n".join(lines)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown table whose columns also line up as plain text; pipes in cells are escaped, line ends are blanks."""
    escaped = []
    for row in (headers, *rows):
        escaped.append([_escaped(cell) for cell in row])
    table = _padded(escaped, min_width=3)
    lines = [f"| {' | '.join(row)} |" for row in table]
    widths = [text_width(cell) for cell in table[0]]
    rules = ["-" * (widths[0] + 2)]
    rules += ["-" * (width + 1) + ":" for width in widths[1:]]
    lines.insert(1, f"|{'|'.join(rules)}|")
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    """A cell of a Markdown table in one line."""
    return " ".join(cell.splitlines()).replace("|", "\\|")


def _padded(table: Sequence[Sequence[str]], min_width: int = 0) -> list[list[str]]:
    """Rows whose cells are padded to the width of their column.

    Cells of the first column are padded on the right, cells of the others on the left.

    Args:
        table: rows of equal length.
        min_width: minimum width of a column in characters.
    """
    widths = []
    for column in zip(*table, strict=True):
        widths.append(max(min_width, *map(text_width, column)))

    padded_rows = []
    for row in table:
        padded = []
        for number, cell in enumerate(row):
            blanks = " " * (widths[number] - text_width(cell))
            padded.append(blanks + cell if number > 0 else cell + blanks)
        padded_rows.append(padded)
    return padded_rows


def text_width(text: str) -> int:
    """Width of a text in terminal columns: wide characters take two columns, combining characters none."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    combining = sum(unicodedata.combining(character) > 0 for character in text)
    return len(text) + wide - combining
