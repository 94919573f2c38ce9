# SPDX-License-Identifier: Apache-2.0
"""Tables as plain text."""

import unicodedata
from collections.abc import Sequence


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first to the left and the others to the right."""
    table = [headers, *rows]
    widths = [max(text_width(row[column]) for row in table) for column in range(len(headers))]
    lines = []
    for row in table:
        spaces = [" " * (width - text_width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [space + cell for space, cell in zip(spaces[1:], row[1:], strict=True)]
        lines.append("  ".join([row[0] + spaces[0], *cells]).rstrip())
    lines.insert(1, "-" * text_width(lines[0]))
    return "\n".join(lines)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as Markdown, which is also readable as plain text; a pipe in a cell is escaped."""
    table = [[cell.replace("|", "\\|") for cell in row] for row in (headers, *rows)]
    widths = [max(3, *(text_width(row[column]) for row in table)) for column in range(len(headers))]
    lines = []
    for row in table:
        spaces = [" " * (width - text_width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [space + cell for space, cell in zip(spaces[1:], row[1:], strict=True)]
        lines.append(f"| {' | '.join([row[0] + spaces[0], *cells])} |")
    lines.insert(1, f"|{'|'.join(['-' * (widths[0] + 2), *('-' * (width + 1) + ':' for width in widths[1:])])}|")
    return "\n".join(lines)


def text_width(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)
