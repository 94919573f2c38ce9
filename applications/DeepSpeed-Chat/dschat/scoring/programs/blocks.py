# SPDX-License-Identifier: Apache-2.0
"""A response → the program in it: which fenced code block is run, and where its characters come from.

Fences follow CommonMark 0.31 (sections 4.5, 5.1 and 5.2): three or more backticks or tildes, indented
by at most three columns, in list items and block quotes as well; closed by a fence of the same character that is at
least as long, else by the end of the item, the quote or the text. One rule of CommonMark is left out on purpose: HTML
does not hide a fence, so that a block below a line `<answer>` counts.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

ProgramBlock = Literal["first", "last"]

THINKING, ANSWERING = "<think>", "</think>"
LINE = re.compile(r"([^\r\n]*)(\r\n|\n|\r|\Z)")
OPENING = re.compile(r"(?P<fence>`{3,})(?P<info>[^`]*)$|(?P<tildes>~{3,})(?P<tilde_info>.*)$")
MARKER = re.compile(r"(?:[-+*]|\d{1,9}[.)])(?=[ \t]|$)")
# The first word behind a fence: python, py3, Python3.11, language-python; or a class in braces, {.python .numbered}.
PYTHON = re.compile(
    r"(?:lang(?:uage)?-)?(?:i?python|py|pypy)[\d.]*(?![^\s,:;={}])|\{(?:[^}]*[\s.])?python[\d.]*[\s},:]", re.I
)
MOST_INDENTED = 3  # columns; a line further in is an indented code block, which opens and closes nothing
TAB = 4  # columns from one tab stop to the next
DEEPEST = 20  # list items and quotes inside one another that are followed


@dataclass(frozen=True)
class ProgramLine:
    """A line of the program.

    Attributes:
        text: with its line ending.
        start: the position of its first character in the response.
    """

    text: str
    start: int


@dataclass(frozen=True)
class Program:
    """A program and where its characters come from."""

    lines: tuple[ProgramLine, ...]

    @property
    def text(self) -> str:
        """The source, without what indents all of it."""
        return "".join(line.text for line in self.lines)

    def position_in_response(self, position: int) -> int:
        """Where a character of the text, or its end, is in the response."""
        ends = list(accumulate(len(line.text) for line in self.lines))
        if not ends:
            return 0
        number = min(bisect_right(ends, position), len(ends) - 1)
        line = self.lines[number]
        return line.start + position - (ends[number] - len(line.text))


@dataclass
class Block:
    """A fenced block: the words behind its opening fence, and its lines without the indentation of the fence."""

    info: str
    lines: list[ProgramLine] = field(default_factory=list)

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing in it."""
        return not any(line.text.strip() for line in self.lines)

    def holds(self, position: int) -> bool:
        """Whether a position of the response is in it."""
        return bool(self.lines) and self.lines[0].start <= position < self.lines[-1].start + len(self.lines[-1].text)


def find_program(response: str, which: ProgramBlock = "last", prompt: str = "") -> Program | None:
    """The program that a response answers with.

    Nothing before its answer counts, see `answer_start`. Of the rest, it is the first or last fenced block that names
    Python; if none does, the first or last block without a name; without such a block, all of the rest. Blank blocks
    are passed over. A block that the prompt leaves open goes on in the response.

    Args:
        which: which of several blocks.
        prompt: what the response follows; one that ends in `<think>` has opened the response's thinking.

    Returns:
        The program; None where the response is still thinking at its end.
    """
    start = answer_start(response, prompt)
    if start is None:
        return None
    lines = _lines(response, start)
    blocks = _blocks(response, start, prompt)
    candidates = [block for block in blocks if names_python(block.info) and not block.is_blank]
    if not candidates:
        candidates = [block for block in blocks if not block.info and not block.is_blank]
    if not candidates:
        return Program(without_margin(lines))
    return Program(without_margin(candidates[0 if which == "first" else -1].lines))


def answer_start(response: str, prompt: str = "") -> int | None:
    """Where the answer of a response begins, behind its thinking; None where it is still thinking at its end.

    A `<think>` at the start of a line opens a thought, outside of blocks; elsewhere it is mentioned. `</think>` closes
    an open thought, inside a block only where none is outside; or one that nothing has opened, outside of blocks and
    code spans.
    """
    start = 0
    is_thinking = prompt.rstrip().endswith(THINKING)
    while True:
        blocks = _blocks(response, start, prompt)
        ends = _places(ANSWERING, response, start)
        outside = [end for end in ends if not any(block.holds(end) for block in blocks)]
        if is_thinking:
            if not ends:
                return None
            start = (outside or ends)[0] + len(ANSWERING)
            is_thinking = False
            continue
        opening = _first_thought(_lines(response, start), blocks)
        before = (end for end in reversed(outside) if opening is None or end < opening)
        closing = next((end for end in before if not _in_code_span(response, end)), None)
        if closing is not None:
            start = closing + len(ANSWERING)
        elif opening is not None:
            start = opening + len(THINKING)
            is_thinking = True
        else:
            return start


def _places(mark: str, text: str, start: int) -> list[int]:
    """Where a mark is in a text from a position on."""
    return [found.start() for found in re.compile(re.escape(mark)).finditer(text, start)]


def _first_thought(lines: Sequence[ProgramLine], blocks: Sequence[Block]) -> int | None:
    """Where the first line outside of the blocks that begins with `<think>` has it."""
    for line in lines:
        text = line.text.lstrip()
        place = line.start + len(line.text) - len(text)
        if text.startswith(THINKING) and not any(block.holds(place) for block in blocks):
            return place
    return None


def _in_code_span(text: str, place: int) -> bool:
    """Whether a place is between backticks in its line."""
    line_start = max(text.rfind("\n", 0, place), text.rfind("\r", 0, place)) + 1
    line_end = LINE.match(text, place)
    assert line_end is not None  # every rest of a text begins with the rest of a line
    return text.count("`", line_start, place) % 2 == 1 and "`" in line_end[0]


def _lines(text: str, start: int = 0) -> list[ProgramLine]:
    """The lines of a text from a position on."""
    return [ProgramLine(found[0], found.start()) for found in LINE.finditer(text, start)]


def _blocks(response: str, start: int, prompt: str) -> list[Block]:
    """The blocks of a response from a position on; from its beginning, with the one that the prompt leaves open."""
    if start == 0 and _ends_in_block(prompt):
        blocks = _continued_blocks(response, prompt)
        is_own = any(_opens_named_block(line) for block in blocks[:1] for line in block.lines)
        if not is_own:  # else the open fence was a slip of the prompt, and the response opens a block itself
            return blocks
    return list(fenced_blocks(_lines(response, start)))


def _ends_in_block(prompt: str) -> bool:
    """Whether a line behind the prompt would be in a block that the prompt has opened."""
    if "```" not in prompt and "~~~" not in prompt:
        return False
    before = prompt if prompt.endswith(("\n", "\r")) else f"{prompt}\n"
    return any(block.holds(len(before)) for block in fenced_blocks(_lines(f"{before}x")))


def _continued_blocks(response: str, prompt: str) -> list[Block]:
    """The blocks of prompt and response together, of which the response holds something, without the prompt's part."""
    lines = [ProgramLine(line.text, line.start - len(prompt)) for line in _lines(prompt + response)]
    blocks = []
    for block in fenced_blocks(lines):
        ending_here = [line for line in block.lines if line.start + len(line.text) > 0]
        own = [_cut(line, max(0, -line.start)) for line in ending_here]
        if own:
            blocks.append(Block(block.info, own))
    return blocks


def _opens_named_block(line: ProgramLine) -> bool:
    opening = OPENING.match(line.text.strip())
    return opening is not None and bool((opening["info"] or opening["tilde_info"] or "").strip())


def program_of(response: str, which: ProgramBlock = "last", prompt: str = "") -> str | None:
    """The text of the program that a response answers with, or None; see `find_program`."""
    program = find_program(response, which, prompt)
    return None if program is None else program.text


def names_python(info: str) -> bool:
    """Whether the words behind an opening fence say that the block is Python."""
    return PYTHON.match(info) is not None


def fenced_blocks(lines: Sequence[ProgramLine]) -> Iterator[Block]:
    """The fenced code blocks of a Markdown text, in their order."""
    containers: list[int | None] = []
    block: Block | None = None
    fence, fence_column = "", 0
    for line in lines:
        content = line.text.rstrip("\r\n")
        cursor, open_containers = _enter(content, containers)
        if block is not None and open_containers < len(containers):
            yield block
            block = None
        del containers[open_containers:]
        if block is None:
            cursor = _open_containers(content, cursor, containers)
            opening = OPENING.match(content, cursor.first) if cursor.indent <= MOST_INDENTED else None
            if opening is not None:
                fence = opening["fence"] or opening["tildes"]
                fence_column = cursor.first_column
                block = Block((opening["info"] or opening["tilde_info"] or "").strip())
        elif cursor.indent <= MOST_INDENTED and _closes(content[cursor.first :], fence):
            yield block
            block = None
        else:
            skipped = _skip(content, cursor, fence_column)
            block.lines.append(ProgramLine(line.text[skipped:], line.start + skipped))
    if block is not None:
        yield block


def without_margin(lines: Sequence[ProgramLine]) -> tuple[ProgramLine, ...]:
    """The lines without the whitespace that all of them begin with, and without any before the first statement.

    No Python program begins with an indented line; tokenizers begin texts with a space, and models indent blocks.
    """
    written = [line.text for line in lines if line.text.strip()]
    if not written:
        return tuple(lines)
    indents = [text[: len(text) - len(text.lstrip(" \t"))] for text in written]
    margin = _common_start(indents)
    shortened = [_cut(line, len(margin)) if line.text.startswith(margin) else line for line in lines]
    first = next(number for number, line in enumerate(shortened) if line.text.strip())
    text = shortened[first].text
    shortened[first] = _cut(shortened[first], len(text) - len(text.lstrip(" \t")))
    return tuple(shortened)


def _common_start(texts: Sequence[str]) -> str:
    shortest, longest = min(texts), max(texts)
    for number, character in enumerate(shortest):
        if longest[number] != character:
            return shortest[:number]
    return shortest


def _cut(line: ProgramLine, count: int) -> ProgramLine:
    return ProgramLine(line.text[count:], line.start + count)


@dataclass(frozen=True)
class _Cursor:
    """Where the content of a line begins, behind the list items and quotes that it belongs to.

    Columns count from the start of the line, with tab stops of four.
    """

    position: int  # of the first character behind the last marker in this line
    column: int  # of that character
    base: int  # column at which the content of the innermost container begins
    first: int  # position of the first character from there that is not whitespace
    first_column: int  # of that character

    @property
    def indent(self) -> int:
        """Columns of whitespace before the content."""
        return self.first_column - self.base


def _cursor(content: str, position: int, column: int, base: int) -> _Cursor:
    first, first_column = position, column
    while first < len(content) and content[first] in " \t":
        first_column += TAB - first_column % TAB if content[first] == "\t" else 1
        first += 1
    return _Cursor(position, column, base, first, first_column)


def _enter(content: str, containers: Sequence[int | None]) -> tuple[_Cursor, int]:
    """The cursor of a line, and how many of the open containers it belongs to.

    Args:
        containers: of each list item, the columns that its marker takes; None for a quote.
    """
    cursor = _cursor(content, 0, 0, 0)
    for number, width in enumerate(containers):
        is_blank = cursor.first == len(content)
        if width is None:
            if is_blank or cursor.indent > MOST_INDENTED or content[cursor.first] != ">":
                return cursor, number
            cursor = _behind_quote(content, cursor)
        else:
            if not is_blank and cursor.indent < width:
                return cursor, number
            cursor = _cursor(content, cursor.position, cursor.column, cursor.base + width)
    return cursor, len(containers)


def _open_containers(content: str, cursor: _Cursor, containers: list[int | None]) -> _Cursor:
    """Adds the list items and quotes that begin in a line; returns the cursor behind their markers."""
    while len(containers) < DEEPEST and cursor.indent <= MOST_INDENTED and cursor.first < len(content):
        marker = MARKER.match(content, cursor.first)
        if content[cursor.first] == ">":
            containers.append(None)
            cursor = _behind_quote(content, cursor)
        elif marker is not None:
            outer = cursor.base
            column = cursor.first_column + len(marker[0])
            behind = _cursor(content, marker.end(), column, column)
            # An item that begins with a blank line or with indented code has its content one column behind the marker.
            is_near = behind.first < len(content) and behind.indent <= TAB
            base = behind.first_column if is_near else column + 1
            containers.append(base - outer)
            cursor = _cursor(content, marker.end(), column, base)
        else:
            break
    return cursor


def _behind_quote(content: str, cursor: _Cursor) -> _Cursor:
    """The cursor behind a quote's `>`, which takes one column of whitespace with it."""
    position = cursor.first + 1
    column = cursor.first_column + 1
    takes_space = content[position : position + 1] in (" ", "\t")
    return _cursor(content, position, column, column + 1 if takes_space else column)


def _closes(text: str, fence: str) -> bool:
    closing = text.rstrip(" \t")
    return len(closing) >= len(fence) and not closing.strip(fence[0])


def _skip(content: str, cursor: _Cursor, column: int) -> int:
    """The position behind the whitespace of a line of code up to a column; a tab that reaches beyond it is kept."""
    position, reached = cursor.position, cursor.column
    while position < cursor.first:
        reached += TAB - reached % TAB if content[position] == "\t" else 1
        if reached > column:
            break
        position += 1
    return position
