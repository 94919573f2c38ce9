# SPDX-License-Identifier: Apache-2.0
"""Constituency trees whose leaves are stretches of characters of a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)  # not frozen: a rollout makes thousands, and freezing makes each four times as expensive
class Tree:
    """A constituent, or, without children, a leaf: a word. Trees are shared and not to be changed.

    Attributes:
        label: category of the constituent (S, NP, …); of a leaf its part of speech, possibly empty.
        start: first character.
        end: the character after the last.
        children: the constituents and words it is made of, from left to right.
    """

    label: str
    start: int
    end: int
    children: tuple[Tree, ...] = ()

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
