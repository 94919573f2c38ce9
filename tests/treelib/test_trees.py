# SPDX-License-Identifier: Apache-2.0
"""Trees: their text form, shifted copies, what makes them sound; and sentences."""

import pytest

from constituent_treelib.chunker import sentence_spans
from constituent_treelib.trees import Tree, is_sound
from treelib_cases import flat_tree


def deep_tree(depth):
    """One word under so many constituents, and a second word at the top."""
    tree = Tree("", 0, 1)
    for _ in range(depth):
        tree = Tree("X", 0, 1, (tree,))
    return Tree("S", 0, 3, (tree, Tree("", 2, 3)))


def test_bracket_string():
    text = "The fox (red) ran."
    words = [Tree("DT", 0, 3), Tree("NN", 4, 7), Tree("", 8, 9), Tree("JJ", 9, 12), Tree(")", 12, 13)]
    tree = Tree(
        "S", 0, 18, (Tree("NP", 0, 13, tuple(words)), Tree("VP", 14, 17, (Tree("", 14, 17),)), Tree("", 17, 18))
    )
    assert tree.bracket_string(text) == "(S (NP (DT The) (NN fox) -LRB- (JJ red) (-RRB- -RRB-)) (VP ran) .)"


@pytest.mark.parametrize(
    ("word", "shown"), [('"(a', '"-LRB-a'), ("))", "-RRB--RRB-"), ("a b", "a_b"), ("“x”", "“x”"), ("'", "'")]
)
def test_brackets_and_quotes_in_words(word, shown):
    assert flat_tree([(0, len(word))]).bracket_string(word) == f"(S {shown})"


def test_leaves_and_nodes_go_from_left_to_right():
    tree = Tree("S", 0, 5, (Tree("A", 0, 3, (Tree("", 0, 1), Tree("", 2, 3))), Tree("", 4, 5)))
    assert [(leaf.start, leaf.end) for leaf in tree.leaves()] == [(0, 1), (2, 3), (4, 5)]
    assert [node.label for node in tree.nodes()] == ["S", "A", "", "", ""]


def test_moved():
    tree = Tree("S", 0, 5, (Tree("A", 0, 3, (Tree("", 0, 1), Tree("x", 2, 3))), Tree("", 4, 5)))
    moved = Tree("S", 7, 12, (Tree("A", 7, 10, (Tree("", 7, 8), Tree("x", 9, 10))), Tree("", 11, 12)))
    assert tree.moved(7) == moved
    assert tree.moved(0) == tree


def test_any_depth():
    tree = deep_tree(20_000).moved(4)
    assert [(leaf.start, leaf.end) for leaf in tree.leaves()] == [(4, 5), (6, 7)]
    assert is_sound(tree, 7)
    assert tree.bracket_string("    a b").endswith(" b)")


@pytest.mark.parametrize(
    ("spans", "sound"),
    [
        ([(0, 1), (1, 2)], True),
        ([(0, 1), (3, 5)], True),
        ([(0, 2), (1, 3)], False),
        ([(2, 3), (0, 1)], False),
        ([(0, 0), (0, 1)], False),
        ([(2, 1)], False),
        ([(3, 6)], False),
        ([(-1, 2)], False),
    ],
)
def test_is_sound(spans, sound):
    """In a text of five characters."""
    assert is_sound(flat_tree(spans), 5) is sound


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n\t\u00a0", []),
        ("One. Two", ["One.", "Two"]),
        ("  One!  Two?\tThree ", ["One!", "Two?", "Three"]),
        ("One\nTwo\r\nThree\rFour\u2028Five", ["One", "Two", "Three", "Four", "Five"]),
        ("\n\n One \n\n", ["One"]),
        ('He said "go." Then (he left.) Then', ['He said "go."', "Then (he left.)", "Then"]),
        ("3.14 is example.com", ["3.14 is example.com"]),
        ("Wait... what?! No", ["Wait...", "what?!", "No"]),
        ("One.\u00a0Two", ["One.", "Two"]),
        ("。你好！吗", ["。你好！吗"]),
        (".", ["."]),
    ],
)
def test_sentence_spans(text, sentences):
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences
