# SPDX-License-Identifier: Apache-2.0
"""The rule that turns trees into macro actions, on examples worked out by hand."""

import re
from dataclasses import dataclass

import pytest

from dschat.conditions.parsing import anchor, macro_action_lengths


@dataclass(frozen=True)
class Node:
    """As little of a tree as the rule needs."""

    start: int
    end: int
    children: tuple["Node", ...] = ()


def read_trees(brackets):
    """Penn brackets, one tree per line → trees, text, spans. `word/3` has three tokens; `¶` in front of a word is a
    line break that is a token of its own."""
    trees, text, spans = [], "", []
    for line in brackets.strip().splitlines():
        stack = [[]]
        for token in re.findall(r"\(\S*|\)|[^\s()]+", line):
            if token.startswith("("):
                stack.append([])
            elif token == ")":
                children = tuple(stack.pop())
                stack[-1].append(Node(children[0].start, children[-1].end, children))
            else:
                word, _, count = token.partition("/")
                if word.startswith("¶"):
                    word = word[1:]
                    spans.append((len(text), len(text) + 1))
                    text += "\n"
                elif text:
                    text += " "
                start, pieces = len(text), int(count or 1)
                text += word
                bounds = [start + len(word) * i // pieces for i in range(pieces + 1)]
                spans += zip(bounds[:-1], bounds[1:], strict=True)
                stack[-1].append(Node(start, len(text)))
        trees += stack[0]
    return trees, text, spans


FOX = "(S (NP The quick fox) (VP jumped (PP over (NP the lazy dog))) .)"
CATS = "(S (NP I) (VP like (NP cats , dogs , birds and fish)) .)"


@pytest.mark.parametrize(
    ("brackets", "cutoff", "trailing", "lengths"),
    [
        (FOX, 5, 1, [4, 5, 1]),
        (FOX, 6, 1, [3, 6, 1]),
        (FOX, 2, 1, [9, 1]),
        ("(S (ADVP Yesterday) , (NP she) (VP read (NP a book)) .)", 5, 1, [3, 4, 1]),
        (CATS, 5, 1, [10, 1]),
        (CATS, 8, 1, [2, 8, 1]),
        ("(S (NP Antidisestablishmentarianism/6) (VP is (ADJP long)) .)\n(INTJ ¶Yes .)", 5, 1, [6, 3, 3, 1]),
        (FOX, 5, 0, [4, 5]),
    ],
    ids=["1", "2, C=6", "2, C=2", "3", "4, C=5", "4, C=8", "5", "6"],
)
def test_worked_examples(brackets, cutoff, trailing, lengths):
    assert macro_action_lengths(*read_trees(brackets), trailing, cutoff) == lengths


def test_no_words():
    assert macro_action_lengths([], "  \n", [(0, 1), (1, 3)], 0, 5) == [2]
    assert macro_action_lengths([], "  \n", [(0, 1), (1, 3)], 1, 5) == [2, 1]
    assert macro_action_lengths([], "", [], 1, 5) == [1]
    assert macro_action_lengths([], "", [], 0, 5) == []


def test_a_word_without_tokens_changes_nothing():
    """One token holds two words and belongs to the first."""
    tree = Node(0, 5, (Node(0, 2), Node(3, 5)))
    assert macro_action_lengths([tree], "ab cd", [(0, 5)], 0, 5) == [1]


def test_a_token_before_the_first_and_after_the_last_word():
    tree = Node(2, 4, (Node(2, 4),))
    assert macro_action_lengths([tree], "  ab  ", [(0, 1), (1, 4), (4, 5), (5, 6)], 0, 5) == [4]


def test_a_tree_of_any_depth():
    node = Node(0, 1)
    for _ in range(5000):
        node = Node(0, 1, (node,))
    assert macro_action_lengths([Node(0, 3, (node, Node(2, 3)))], "a b", [(0, 1), (1, 3)], 0, 1) == [2]


@pytest.mark.parametrize(
    ("text", "span", "expected"),
    [("ab", (0, 2), 0), (" ab", (0, 3), 1), ("a \n", (1, 3), 3), ("ab", (1, 1), 1), ("\u00a0x", (0, 2), 1)],
)
def test_anchor(text, span, expected):
    assert anchor(text, *span) == expected
