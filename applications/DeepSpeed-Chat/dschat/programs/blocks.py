# SPDX-License-Identifier: Apache-2.0
"""Finds the program in a response: which fenced code block is run, and the positions of its characters.

Fences are those of CommonMark, found by markdown-it-py. One rule of CommonMark is omitted on purpose: HTML does not
hide a fence, so that a block below a line `<answer>` counts.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, blockquote
from markdown_it.token import Token

ProgramBlock = Literal["first", "last"]

THINK_START = "<think>"
THINK_END = "</think>"
THOUGHT = re.compile(rf"\s*{THINK_START}")
FENCE = re.compile("```|~~~")
LINE = re.compile(r"([^\r\n]*)(\r\n|\n|\r|\Z)")
# The first word after a fence: python, py3, Python3.11, language-python; or a class in braces, {.python .numbered}.
PYTHON = re.compile(
    r"(?:lang(?:uage)?-)?(?:i?python|py|pypy)[\d.]*(?![^\s,:;={}])|\{(?:[^}]*[\s.])?python[\d.]*[\s},:]", re.I
)


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


def find_program(response: str, which: ProgramBlock = "last", prompt: str = "") -> Program | None:
    """The program in a response's answer.

    Only the answer counts, see `answer_start`. The program is the first or last fenced block that names Python; if
    there is none, the first or last block without a name; otherwise the whole answer. Blank blocks are ignored. A
    block that the last line of the prompt opens continues in the response.

    Args:
        response: response of a policy.
        which: which of several blocks.
        prompt: before the response; if it ends in `<think>`, the response begins with a thought.

    Returns:
        The program; None if the response ends in a thought, or its answer is blank.
    """
    start = answer_start(response, prompt)
    if start is None or not response[start:].strip():
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
    """The position after the thoughts with which a response begins; None if it ends in one.

    A thought begins with `<think>`, which may be the end of the prompt, and ends with the next `</think>`.
    """
    start = 0
    is_thinking = prompt.rstrip().endswith(THINK_START)
    while is_thinking or THOUGHT.match(response, start):
        end = response.find(THINK_END, start)
        if end == -1:
            return None
        start = end + len(THINK_END)
        is_thinking = False
    return start


def _lines(text: str, start: int = 0) -> list[ProgramLine]:
    """The lines of a text from a position on."""
    return [ProgramLine(line[0], line.start()) for line in LINE.finditer(text, start)]


def _blocks(response: str, start: int, prompt: str) -> list[Block]:
    """The blocks of a response from a position on, with one that the last line of the prompt opens."""
    if start > 0 or not FENCE.search(prompt):
        return fenced_blocks(_lines(response, start))
    opening = _open_fence(prompt)
    lines = [ProgramLine(line.text, line.start - len(opening)) for line in _lines(opening + response)]
    return fenced_blocks(lines)


def _open_fence(prompt: str) -> str:
    """The last line of a prompt if it opens a block that the response is to fill; otherwise empty."""
    lines = _lines(prompt.removesuffix("\n") + "\nx")
    blocks = fenced_blocks(lines)
    is_open = bool(blocks) and [line.text for line in blocks[-1].lines] == ["x"]
    last_line = lines[-3]  # before x and the empty line at the end
    return prompt[last_line.start :] if is_open else ""


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
    contents = [line.text.rstrip("\r\n") for line in lines]
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
