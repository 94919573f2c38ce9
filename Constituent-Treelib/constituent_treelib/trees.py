# SPDX-License-Identifier: Apache-2.0
"""Constituency trees whose leaves are spans of characters of a text, and pictures of them."""

from __future__ import annotations

import os
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

T = TypeVar("T")
# Lengths in pictures are in pixels.
FONT_SIZE = 15.0
ROW = 46.0  # height
GAP = 16.0  # between neighbours
MARGIN = 14.0
_LABEL_CLEARANCE = FONT_SIZE * 0.75  # between the middle of a label and the lines that begin or end there
_COLOURS = {"constituent": "#1a4f8b", "tag": "#5b6770", "word": "#111111"}
_LINE = "#9aa5b1"
_MAX_PIXELS = 60_000  # of a side; matplotlib's limit is 65,535


@dataclass(slots=True)  # not frozen: a rollout makes thousands, and freezing makes each four times as expensive
class Tree:
    """A constituent or, without children, a word. Trees are shared and must not be changed."""

    label: str  # category of a constituent (S, NP, …); part of speech of a word, possibly empty
    start: int  # first character
    end: int  # after the last character
    children: tuple[Tree, ...] = ()  # constituents and words, from left to right

    def nodes(self) -> list[Tree]:
        """The tree and everything below it, each before its children, from left to right."""
        return [node for node, _ in _nodes(self)]

    def leaves(self) -> list[Tree]:
        """The words, from left to right."""
        leaves: list[Tree] = []
        for node, count in _nodes(self):
            if not count:
                leaves.append(node)
        return leaves

    def moved(self, offset: int) -> Tree:
        """A copy with every character position shifted by `offset`."""
        if not offset:
            return self

        def move(node: Tree, children: list[Tree]) -> Tree:
            return Tree(node.label, node.start + offset, node.end + offset, tuple(children))

        return fold(self, move)

    def bracket_string(self, text: str) -> str:
        """The tree in Penn brackets: ``(S (NP (DT The) (NN fox)) …)``; brackets inside words as -LRB- and -RRB-.

        Args:
            text: the text that the positions refer to.
        """

        def brackets(node: Tree, parts: list[str]) -> str:
            content = " ".join(parts) if parts else escape_brackets(text[node.start : node.end])
            if not parts and not node.label:
                return content
            return f"({escape_brackets(node.label)} {content})"

        return fold(self, brackets)


def fold(root: Any, make: Callable[[Any, list[T]], T]) -> T:
    """Computes a value from the words up to the root, without recursion, so that any depth works.

    Args:
        root: of a tree of any kind whose nodes have `children`.
        make: takes a node and the values of its children.
    """
    values: list[T] = []  # of nodes whose parent has none yet, from right to left
    for node, child_count in reversed(_nodes(root)):
        first = len(values) - child_count
        children = values[first:][::-1]
        del values[first:]
        values.append(make(node, children))
    return values[0]


def _nodes(root: Any) -> list[tuple[Any, int]]:
    """Every node with its number of children, parents first, from left to right."""
    nodes = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        children = node.children
        nodes.append((node, len(children)))
        waiting.extend(reversed(children))
    return nodes


def escape_brackets(word: str) -> str:
    """A word in the notation of Penn trees: brackets by name, blanks inside it as underscores."""
    return "_".join(word.replace("(", "-LRB-").replace(")", "-RRB-").split())


def is_sound(tree: Tree, length: int) -> bool:
    """Whether the leaves are non-empty spans of a text of ``length`` characters, in order and without overlap."""
    position = 0
    for leaf in tree.leaves():
        if not position <= leaf.start < leaf.end <= length:
            return False
        position = leaf.end
    return True


class TreelibError(ValueError):
    """An error that a user can correct; the message says how."""


@dataclass(frozen=True)
class Label:
    """A text in a picture, centred on (x, y); its kind is constituent, tag (part of speech) or word."""

    text: str
    x: float
    y: float
    kind: str


@dataclass(frozen=True)
class Picture:
    """Labels and lines in pixels from the top left corner; a line has two points or three."""

    width: float
    height: float
    labels: list[Label]
    lines: list[list[tuple[float, float]]]


@dataclass(frozen=True)
class _Box:
    """A node with the width of its subtree and the number of rows below it."""

    node: Tree
    width: float
    rows: int
    children: list[_Box]

    @property
    def children_width(self) -> float:
        """Width of all children together."""
        return sum(child.width for child in self.children)


@dataclass(frozen=True)
class _PlacedBox:
    """A box with its position, and the beginning of the line from its parent (empty for the root)."""

    box: _Box
    left: float
    y: float
    line: list[tuple[float, float]]


def arrange(tree: Tree, text: str) -> Picture:
    """Places constituents above their parts, and all words on the bottom line, so that the sentence can be read.

    Args:
        tree: of any depth.
        text: the text that its positions refer to.
    """
    root = fold(tree, lambda node, children: _make_box(node, children, text))
    top = MARGIN + FONT_SIZE / 2
    tag_height = FONT_SIZE * 1.3 if any(leaf.label for leaf in tree.leaves()) else 0.0
    bottom = top + ROW * root.rows + tag_height
    labels: list[Label] = []
    lines: list[list[tuple[float, float]]] = []
    waiting = [_PlacedBox(root, MARGIN, top, [])]
    while waiting:
        placed = waiting.pop()
        box = placed.box
        node = box.node
        x = placed.left + box.width / 2
        line_end = [(x, placed.y - _LABEL_CLEARANCE)]
        if box.children:
            labels.append(Label(visible(node.label), x, placed.y, "constituent"))
        else:
            labels.append(Label(visible(text[node.start : node.end]), x, bottom, "word"))
            labels.append(Label(visible(node.label), x, bottom - tag_height, "tag"))
            # The line goes on down the word's own column.
            word_top = bottom - (tag_height if node.label else 0.0)
            line_end.append((x, word_top - _LABEL_CLEARANCE))
        if placed.line:
            lines.append(placed.line + line_end)

        left = placed.left + (box.width - box.children_width) / 2
        children = []
        line_start = (x, placed.y + _LABEL_CLEARANCE)
        for child in box.children:
            children.append(_PlacedBox(child, left, placed.y + ROW, [line_start]))
            left += child.width
        waiting += reversed(children)
    labels = [label for label in labels if label.text]
    return Picture(root.width + 2 * MARGIN, bottom + FONT_SIZE / 2 + MARGIN, labels, lines)


def _make_box(node: Tree, children: list[_Box], text: str) -> _Box:
    width = text_width(visible(node.label), bold=bool(children))
    if not children:
        width = max(width, text_width(visible(text[node.start : node.end])))
    rows = 1 + max((box.rows for box in children), default=-1)
    children_width = sum(child.width for child in children)
    return _Box(node, max(width + GAP, children_width), rows, children)


def draw_svg(tree: Tree, text: str) -> str:
    """The tree as an SVG document; the text is escaped."""
    picture = arrange(tree, text)
    width = f"{picture.width:.0f}"
    height = f"{picture.height:.0f}"
    lines = ""
    for line in picture.lines:
        lines += "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
    elements = []
    for label in picture.labels:
        position = f'x="{label.x:.1f}" y="{label.y:.1f}"'
        elements.append(f'<text {position} class="{label.kind}">{escape(label.text)}</text>')
    labels = "\n".join(elements)
    font = f'{FONT_SIZE:g}px "DejaVu Sans",Verdana,Helvetica,sans-serif'
    styles = "".join(f".{kind}{{fill:{colour}}}" for kind, colour in _COLOURS.items())
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>text{{font:{font};text-anchor:middle;dominant-baseline:central}}
{styles}.constituent{{font-weight:bold}}.tag{{font-size:{0.8 * FONT_SIZE:g}px}}</style>
<rect width="100%" height="100%" fill="#ffffff"/>
<path d="{lines}" stroke="{_LINE}" fill="none"/>
{labels}
</svg>
"""


def draw_png(tree: Tree, text: str, path: str | os.PathLike[str]) -> None:
    """Writes the tree as a PNG file with twice the resolution of the SVG, or less for a very large tree.

    Raises:
        TreelibError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import LineCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TreelibError(f"a PNG needs matplotlib ({error}): pip install matplotlib, or write an SVG.") from error
    picture = arrange(tree, text)
    scale = min(2.0, _MAX_PIXELS / picture.width, _MAX_PIXELS / picture.height)
    figure = Figure(figsize=(picture.width / 100, picture.height / 100), dpi=100 * scale, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.add_collection(LineCollection(picture.lines, colors=_LINE, linewidths=0.8))
    for label in picture.labels:
        axes.text(
            *(label.x, label.y, label.text),
            color=_COLOURS[label.kind],
            fontsize=FONT_SIZE * 0.72 * (0.8 if label.kind == "tag" else 1),
            fontweight="bold" if label.kind == "constituent" else "normal",
            ha="center",
            va="center",
            parse_math=False,
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # of scripts that the font does not have
        FigureCanvasAgg(figure).print_png(os.fspath(path))


def visible(text: str) -> str:
    """A text for a picture: with single blanks, and U+FFFD for characters that XML does not allow."""
    single_blanks = " ".join(text.split())
    return "".join(char if _is_allowed_in_xml(char) else "\ufffd" for char in single_blanks)


def _is_allowed_in_xml(char: str) -> bool:
    code = ord(char)
    return code >= 0x20 and not 0x7F <= code < 0xA0 and not 0xD800 <= code < 0xE000 and code & 0xFFFE != 0xFFFE


def text_width(text: str, bold: bool = False) -> float:
    """Approximate width of a text in pixels."""
    ems = sum(_char_width(char) for char in text)
    return FONT_SIZE * ems * (1.12 if bold else 1.0)


def _char_width(char: str) -> float:
    """Approximate width of a character in ems."""
    category = unicodedata.category(char)
    if unicodedata.combining(char) or category in ("Cf", "Me", "Mn"):
        return 0.0
    if unicodedata.east_asian_width(char) in "WF" or category == "So":
        return 1.1
    if char in "mwMW@%":
        return 0.85
    if char in "ijlI.,;:'|!()[] ":
        return 0.36
    return 0.64
