# SPDX-License-Identifier: Apache-2.0
"""Finds the program in a response: which fenced code block is run, and the positions of its characters.

Fences are those of CommonMark, found by markdown-it-py. One rule of CommonMark is omitted on purpose: HTML does not
hide a fence, so that a block below a line `<answer>` counts.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, blockquote
from markdown_it.token import Token

ProgramBlock = Literal["first", "last"]

THINK_START = "<think>"
THINK_END = "</think>"
FENCE_MARK = re.compile("[`~]")
LINE = re.compile(r"([^\r\n]*)(\r\n|\n|\r|\Z)")
# The first word after a fence: python, py3, Python3.11, language-python; or a class in braces, {.python .numbered}.
PYTHON = re.compile(
    r"(?:lang(?:uage)?-)?(?:i?python|py|pypy)[\d.]*(?![^\s,:;={}])|\{(?:[^}]*[\s.])?python[\d.]*[\s},:]", re.I
)
LINES_OF_FIRST_PART = 32  # that are parsed in search of a thought


@dataclass(frozen=True)
class ProgramLine:
    """A line of the program.

    Attributes:
        text: with its line ending.
        start: position of its first character in the response.
    """

    text: str
    start: int


@dataclass(frozen=True)
class Program:
    """A program, and the positions of its lines in the response."""

    lines: tuple[ProgramLine, ...]

    @property
    def text(self) -> str:
        """The source, without common indentation."""
        return "".join(line.text for line in self.lines)

    def position_in_response(self, position: int) -> int:
        """The position in the response of a character of the text, or of its end."""
        ends = list(accumulate(len(line.text) for line in self.lines))
        if not ends:
            return 0
        number = min(bisect_right(ends, position), len(ends) - 1)
        line = self.lines[number]
        return line.start + position - (ends[number] - len(line.text))


@dataclass
class Block:
    """A fenced block: the words after its opening fence, and its lines without the fence's indentation."""

    info: str
    lines: list[ProgramLine] = field(default_factory=list)

    @property
    def is_blank(self) -> bool:
        """Whether the block has only whitespace."""
        return not any(line.text.strip() for line in self.lines)

    @property
    def end(self) -> int:
        """The position after the block's last line in the response; 0 without lines."""
        return self.lines[-1].start + len(self.lines[-1].text) if self.lines else 0

    def holds(self, position: int) -> bool:
        """Whether a position of the response is in the block."""
        return bool(self.lines) and self.lines[0].start <= position < self.end


def find_program(response: str, which: ProgramBlock = "last", prompt: str = "") -> Program | None:
    """The program in a response's answer.

    Only the answer counts, see `answer_start`. The program is the first or last fenced block that names Python; if
    there is none, the first or last block without a name; otherwise the whole answer. Blank blocks are ignored. A
    block that the prompt leaves open continues in the response.

    Args:
        response: response of a policy.
        which: which of several blocks.
        prompt: before the response; if it ends in `<think>`, the response begins with a thought.

    Returns:
        The program; None if the response ends in a thought.
    """
    start = answer_start(response, prompt)
    if start is None:
        return None
    lines = _lines(response, start)
    blocks = [block for block in _blocks(response, start, prompt) if not block.is_blank]
    candidates = [block for block in blocks if names_python(block.info)]
    if not candidates:
        candidates = [block for block in blocks if not block.info]
    if not candidates:
        return Program(without_margin(lines))
    return Program(without_margin(candidates[0 if which == "first" else -1].lines))


def answer_start(response: str, prompt: str = "") -> int | None:
    """The position after a response's thoughts; None if it ends in a thought.

    A `<think>` at the start of a line outside blocks opens a thought. A `</think>` closes an open thought, preferably
    one outside blocks. Without an open thought, a `</think>` outside blocks and code spans closes one from the start.
    """
    start = 0
    is_thinking = prompt.rstrip().endswith(THINK_START)
    ends_in_code_spans = _ends_in_code_spans(response)
    while True:
        if is_thinking:
            end = _end_of_open_thought(response, start, prompt)
            if end is None:
                return None
            start = end + len(THINK_END)
            is_thinking = False
            continue
        opening, outer_ends = _next_thought(response, start, prompt)
        closings = [end for end in outer_ends if end not in ends_in_code_spans]
        if closings:
            start = closings[-1] + len(THINK_END)
        elif opening is not None:
            start = opening + len(THINK_START)
            is_thinking = True
        else:
            return start


def _end_of_open_thought(response: str, start: int, prompt: str) -> int | None:
    """The position of the first `</think>` outside blocks, or else of the first in a block."""
    ends: list[int] = []
    for lines, blocks in _growing_parts(response, start, prompt):
        ends = _positions_of_ends(lines)
        outer_ends = _outside_blocks(ends, blocks)
        if outer_ends:
            return outer_ends[0]
    return ends[0] if ends else None


def _next_thought(response: str, start: int, prompt: str) -> tuple[int | None, list[int]]:
    """The position of the first `<think>` at the start of a line outside blocks, and each `</think>` before it."""
    outer_ends: list[int] = []
    for lines, blocks in _growing_parts(response, start, prompt):
        openings = _outside_blocks(_positions_of_openings(lines), blocks)
        outer_ends = _outside_blocks(_positions_of_ends(lines), blocks)
        if openings:
            return openings[0], outer_ends[: bisect_left(outer_ends, openings[0])]
    return None, outer_ends


def _growing_parts(response: str, start: int, prompt: str) -> Iterator[tuple[list[ProgramLine], list[Block]]]:
    """Lines of the response from a position on, with their blocks: a few lines, twice as many, …, all.

    What is in a block depends on no later line. So a response of many thoughts is not parsed once for each of them.
    """
    if start == 0:
        yield _lines(response), _blocks(response, start, prompt)
        return
    count = LINES_OF_FIRST_PART
    while True:
        lines = list(islice(_iterate_lines(response, start), count))
        yield lines, fenced_blocks(lines)
        if len(lines) < count:
            return
        count *= 2


def _positions_of_ends(lines: Sequence[ProgramLine]) -> list[int]:
    """The positions of each `</think>`."""
    positions: list[int] = []
    for line in lines:
        for match in re.finditer(THINK_END, line.text):
            positions.append(line.start + match.start())
    return positions


def _positions_of_openings(lines: Sequence[ProgramLine]) -> list[int]:
    """The positions of each `<think>` at the start of a line, after whitespace."""
    positions: list[int] = []
    for line in lines:
        text = line.text.lstrip()
        if text.startswith(THINK_START):
            positions.append(line.start + len(line.text) - len(text))
    return positions


def _outside_blocks(positions: Sequence[int], blocks: Sequence[Block]) -> list[int]:
    """The positions that are in none of the blocks. Both are in ascending order, so one pass is enough."""
    outside: list[int] = []
    number = 0
    for position in positions:
        while number < len(blocks) and blocks[number].end <= position:
            number += 1
        if number == len(blocks) or not blocks[number].holds(position):
            outside.append(position)
    return outside


def _ends_in_code_spans(text: str) -> set[int]:
    """The positions of each `</think>` between backticks of its line: an odd number before it, at least one after."""
    positions: set[int] = set()
    for line in _iterate_lines(text):
        backticks_of_line = line.text.count("`")
        backticks_before = 0
        position = line.start
        for part in line.text.split(THINK_END)[:-1]:
            position += len(part)
            backticks_before += part.count("`")
            if backticks_before % 2 == 1 and backticks_before < backticks_of_line:
                positions.add(position)
            position += len(THINK_END)
    return positions


def _lines(text: str, start: int = 0) -> list[ProgramLine]:
    """The lines of a text from a position on."""
    return list(_iterate_lines(text, start))


def _iterate_lines(text: str, start: int = 0) -> Iterator[ProgramLine]:
    for match in LINE.finditer(text, start):
        yield ProgramLine(match[0], match.start())


def _blocks(response: str, start: int, prompt: str) -> list[Block]:
    """The blocks of a response from a position on; from its beginning, with one that the prompt leaves open."""
    if start == 0 and _ends_in_block(prompt):
        blocks = _continued_blocks(response, prompt)
        first_lines = blocks[0].lines if blocks else []
        # If the response opens a named block itself, the open fence was a mistake in the prompt.
        if not any(map(_opens_named_block, first_lines)):
            return blocks
    return fenced_blocks(_lines(response, start))


def _ends_in_block(prompt: str) -> bool:
    """Whether a line after the prompt would be in a block that the prompt has opened."""
    if "```" not in prompt and "~~~" not in prompt:
        return False
    prefix = prompt if prompt.endswith(("\n", "\r")) else f"{prompt}\n"
    return any(block.holds(len(prefix)) for block in fenced_blocks(_lines(f"{prefix}x")))


def _continued_blocks(response: str, prompt: str) -> list[Block]:
    """The blocks of prompt and response together, without lines of the prompt and blocks of the prompt alone."""
    lines = [ProgramLine(line.text, line.start - len(prompt)) for line in _lines(prompt + response)]
    blocks: list[Block] = []
    for block in fenced_blocks(lines):
        response_lines: list[ProgramLine] = []
        for line in block.lines:
            if line.start + len(line.text) > 0:
                response_lines.append(_cut(line, max(0, -line.start)))
        if response_lines:
            blocks.append(Block(block.info, response_lines))
    return blocks


def _opens_named_block(line: ProgramLine) -> bool:
    line = _cut(line, len(_indentation(line)))
    return any(block.info for block in fenced_blocks([line]))


def program_of(response: str, which: ProgramBlock = "last", prompt: str = "") -> str | None:
    """The text of the program in a response's answer, or None; see `find_program`."""
    program = find_program(response, which, prompt)
    return None if program is None else program.text


def names_python(info: str) -> bool:
    """Whether the words after an opening fence name Python."""
    return PYTHON.match(info) is not None


def _quote(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """markdown-it's rule of quotes, for a quote that ends at the first line without its mark.

    Otherwise each quote would be searched up to the end of the text for lines that continue its paragraph.
    """
    number = start + 1
    while number < end and state.src.startswith(">", state.bMarks[number] + state.tShift[number]):
        number += 1
    return blockquote(state, start, number, silent)


MARKDOWN = MarkdownIt("commonmark").disable("html_block")
MARKDOWN.block.ruler.at("blockquote", _quote, {"alt": ["paragraph", "reference", "blockquote", "list"]})


def fenced_blocks(lines: Sequence[ProgramLine]) -> list[Block]:
    """The fenced code blocks of a Markdown text, in order."""
    contents: list[str] = []
    for line in lines:
        content = line.text.rstrip("\r\n")
        # A thought that ends behind a fence has opened no block. What follows is parsed anew.
        contents.append(FENCE_MARK.sub("x", content) if THINK_END in content else content)
    tokens: list[Token] = []
    MARKDOWN.block.parse("\n".join(contents), MARKDOWN, {}, tokens)
    blocks: list[Block] = []
    for token in tokens:
        if token.type != "fence":
            continue
        assert token.map is not None
        block = Block(token.info.strip())
        code_lines = token.content.removesuffix("\n").split("\n") if token.content else []
        for number, code in enumerate(code_lines, start=token.map[0] + 1):
            removed = len(contents[number]) - len(code)  # indentation, and marks of quotes
            block.lines.append(_cut(lines[number], max(0, removed)))
        blocks.append(block)
    return blocks


def without_margin(lines: Sequence[ProgramLine]) -> tuple[ProgramLine, ...]:
    """Removes the lines' common indentation, and any of the first line with text.

    No Python program begins with an indented line, but tokenizers add a space before texts, and models indent blocks.
    """
    code_lines = [line for line in lines if line.text.strip()]
    if not code_lines:
        return tuple(lines)
    margin = os.path.commonprefix([_indentation(line) for line in code_lines])
    shortened: list[ProgramLine] = []
    is_first = True
    for line in lines:
        if line.text.startswith(margin):
            line = _cut(line, len(margin))
        if is_first and line.text.strip():
            line = _cut(line, len(_indentation(line)))
            is_first = False
        shortened.append(line)
    return tuple(shortened)


def _indentation(line: ProgramLine) -> str:
    return line.text[: len(line.text) - len(line.text.lstrip(" \t"))]


def _cut(line: ProgramLine, count: int) -> ProgramLine:
    return ProgramLine(line.text[count:], line.start + count)
