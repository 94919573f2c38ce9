# SPDX-License-Identifier: Apache-2.0
"""Constituency trees whose leaves are stretches of characters of a text, and pictures of them."""

from __future__ import annotations

import os
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any, TypeVar

T = TypeVar("T")
FONT_SIZE = 15.0  # of pictures; all lengths in pixels
ROW = 46.0
GAP = 16.0
MARGIN = 14.0
_AROUND = FONT_SIZE * 0.75  # between the middle of a label and the lines that begin or end there
_COLOURS = {"constituent": "#1a4f8b", "tag": "#5b6770", "word": "#111111"}
_LINE = "#9aa5b1"
_MOST_PIXELS = 60_000  # of a side; matplotlib draws no more than 65,535


@dataclass(slots=True)  # not frozen: a rollout makes thousands, and freezing makes each four times as expensive
class Tree:
    """A constituent, or, without children, a leaf: a word. Trees are shared and not to be changed."""

    label: str  # category of the constituent (S, NP, …); of a leaf its part of speech, possibly empty
    start: int  # first character
    end: int  # the character after the last
    children: tuple[Tree, ...] = ()  # the constituents and words it is made of, from left to right

    def nodes(self) -> list[Tree]:
        """The tree and everything below it, each before its children, from left to right."""
        return [node for node, _ in _nodes(self)]

    def leaves(self) -> list[Tree]:
        """The words, from left to right."""
        return [node for node, count in _nodes(self) if not count]

    def moved(self, offset: int) -> Tree:
        """The same tree with every character position shifted."""
        if not offset:
            return self
        return fold(self, lambda node, parts: Tree(node.label, node.start + offset, node.end + offset, tuple(parts)))

    def bracket_string(self, text: str) -> str:
        """The tree in Penn brackets: ``(S (NP (DT The) (NN fox)) …)``; brackets inside words as -LRB- and -RRB-.

        Args:
            text: the text that the positions count in.
        """

        def brackets(node: Tree, parts: list[str]) -> str:
            content = " ".join(parts) if parts else escape_brackets(text[node.start : node.end])
            return f"({escape_brackets(node.label)} {content})" if parts or node.label else content

        return fold(self, brackets)


def fold(root: Any, make: Callable[[Any, list[T]], T]) -> T:
    """Makes something of a tree, from the words up; without recursion, so that no depth is too much.

    Args:
        root: of a tree of any kind whose nodes have `children`.
        make: gets a node and what it made of the node's children.
    """
    made: list[T] = []  # what has no parent yet, from right to left
    for node, count in reversed(_nodes(root)):
        first = len(made) - count
        children = made[first:][::-1]
        del made[first:]
        made.append(make(node, children))
    return made[0]


def _nodes(root: Any) -> list[tuple[Any, int]]:
    """Every node with the number of its children, each before its children, from left to right."""
    nodes, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        children = node.children
        nodes.append((node, len(children)))
        waiting.extend(reversed(children))
    return nodes


def escape_brackets(word: str) -> str:
    """A word as Penn trees write it: brackets by name, blanks inside it as underscores."""
    return "_".join(word.replace("(", "-LRB-").replace(")", "-RRB-").split())


def is_sound(tree: Tree, length: int) -> bool:
    """Whether the leaves are non-empty stretches of a text of ``length`` characters, in order and without overlap."""
    position = 0
    for leaf in tree.leaves():
        if not position <= leaf.start < leaf.end <= length:
            return False
        position = leaf.end
    return True


class TreelibError(ValueError):
    """Something a user can put right: the message says what to do."""


@dataclass(frozen=True)
class Label:
    """A text, centred on (x, y); its kind is constituent, tag (part of speech) or word."""

    text: str
    x: float
    y: float
    kind: str


@dataclass(frozen=True)
class Picture:
    """Where everything is, in pixels from the top left corner; a line goes through two points or three."""

    width: float
    height: float
    labels: list[Label]
    lines: list[list[tuple[float, float]]]


@dataclass(frozen=True)
class _Box:
    """A node, how wide it is with all that is below it, and the number of rows below it."""

    node: Tree
    width: float
    rows: int
    below: list[_Box]


def arrange(tree: Tree, text: str) -> Picture:
    """Constituents above what they are made of; all words on the bottom line, so that the sentence can be read.

    Args:
        tree: of any depth.
        text: that its positions count in.
    """
    root = fold(tree, lambda node, below: _box(node, below, text))
    top = MARGIN + FONT_SIZE / 2
    tags = FONT_SIZE * 1.3 if any(leaf.label for leaf in tree.leaves()) else 0.0
    bottom = top + ROW * root.rows + tags
    labels: list[Label] = []
    lines: list[list[tuple[float, float]]] = []
    # Boxes that have no place yet, each with its left edge, its y, and the beginning of the line that leads to it.
    waiting: list[tuple[_Box, float, float, list[tuple[float, float]]]] = [(root, MARGIN, top, [])]
    while waiting:
        box, left, y, line = waiting.pop()
        node, x = box.node, left + box.width / 2
        ends = [(x, y - _AROUND)]
        if box.below:
            labels.append(Label(visible(node.label), x, y, "constituent"))
        else:
            labels.append(Label(visible(text[node.start : node.end]), x, bottom, "word"))
            labels.append(Label(visible(node.label), x, bottom - tags, "tag"))
            ends.append((x, bottom - (tags if node.label else 0.0) - _AROUND))  # down its own column
        if line:
            lines.append(line + ends)
        lefts = accumulate([left + (box.width - _total(box.below)) / 2, *(child.width for child in box.below)])
        children = zip(box.below, lefts, strict=False)
        waiting += reversed([(child, start, y + ROW, [(x, y + _AROUND)]) for child, start in children])
    labels = [label for label in labels if label.text]
    return Picture(root.width + 2 * MARGIN, bottom + FONT_SIZE / 2 + MARGIN, labels, lines)


def _box(node: Tree, below: list[_Box], text: str) -> _Box:
    width = text_width(visible(node.label), bold=bool(below))
    if not below:
        width = max(width, text_width(visible(text[node.start : node.end])))
    rows = 1 + max((box.rows for box in below), default=-1)
    return _Box(node, max(width + GAP, _total(below)), rows, below)


def _total(boxes: list[_Box]) -> float:
    return sum(box.width for box in boxes)


def draw_svg(tree: Tree, text: str) -> str:
    """The tree as an SVG document; what the text says is escaped."""
    picture = arrange(tree, text)
    width, height = f"{picture.width:.0f}", f"{picture.height:.0f}"
    lines = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line) for line in picture.lines)
    labels = "\n".join(
        f'<text x="{label.x:.1f}" y="{label.y:.1f}" class="{label.kind}">{escape(label.text)}</text>'
        for label in picture.labels
    )
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
    """Writes the tree as a PNG file, of twice the pixels of the SVG; of fewer for a very large tree.

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
    scale = min(2.0, _MOST_PIXELS / picture.width, _MOST_PIXELS / picture.height)
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
    """A text as it can stand in a picture: blanks as one, and what XML does not allow as U+FFFD."""
    return "".join(char if _is_allowed(char) else "\ufffd" for char in " ".join(text.split()))


def _is_allowed(char: str) -> bool:
    code = ord(char)
    return code >= 0x20 and not 0x7F <= code < 0xA0 and not 0xD800 <= code < 0xE000 and code & 0xFFFE != 0xFFFE


def text_width(text: str, bold: bool = False) -> float:
    """About how wide a text is, in pixels."""
    ems = 0.0
    for char in text:
        if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Me", "Mn"):
            continue
        wide = unicodedata.east_asian_width(char) in "WF" or unicodedata.category(char) == "So"
        ems += 1.1 if wide else 0.85 if char in "mwMW@%" else 0.36 if char in "ijlI.,;:'|!()[] " else 0.64
    return FONT_SIZE * ems * (1.12 if bold else 1.0)
