# SPDX-License-Identifier: Apache-2.0
"""One sentence: its words, phrases, brackets, nltk tree and pictures."""

import re
import unicodedata
import xml.etree.ElementTree as ElementTree

import pytest

from constituent_treelib import ConstituentTree, Tree, TreelibError
from constituent_treelib.trees import arrange, draw_svg
from treelib_cases import TEXTS

SENTENCE = "The fox (red) jumped over it."
SVG = "{http://www.w3.org/2000/svg}"


class Answer:
    """A backend that gives a fixed answer, and keeps what it was given."""

    name, version = "fixed", "1"

    def __init__(self, *answer, unit="sentence"):
        self.answer = answer
        self.unit = unit
        self.given = []

    def parse(self, units):
        self.given += units
        return self.answer


def fox_tree():
    """(S (NP (DT The) (NN fox) (PRN ( (JJ red) ))) (VP jumped (PP over (NP it))) .)"""
    prn = Tree("PRN", 8, 13, (Tree("", 8, 9), Tree("JJ", 9, 12), Tree("", 12, 13)))
    np = Tree("NP", 0, 13, (Tree("DT", 0, 3), Tree("NN", 4, 7), prn))
    pp = Tree("PP", 21, 28, (Tree("", 21, 25), Tree("NP", 26, 28, (Tree("", 26, 28),))))
    return Tree("S", 0, 29, (np, Tree("VP", 14, 28, (Tree("", 14, 20), pp)), Tree("", 28, 29)))


@pytest.fixture
def tree():
    return ConstituentTree(f"  {SENTENCE}\n", Answer(fox_tree()))


@pytest.mark.parametrize("answer", [(), (None,), (Tree("S", 0, 99),)])
def test_a_backend_without_a_sound_tree(answer):
    with pytest.raises(TreelibError, match="backend fixed has no tree of 'Dogs bark.'; the backend chunker has one"):
        ConstituentTree("Dogs bark.", Answer(*answer))


def test_a_program_keeps_the_indentation_of_its_first_line():
    program = "    x = 1\n    y = 2"
    backend = Answer(Tree("module", 4, len(program)), unit="text")
    assert ConstituentTree(f"\n{program}\n", backend).sentence == program
    assert backend.given == [program]


def test_brackets_and_words(tree):
    brackets = "(S (NP (DT The) (NN fox) (PRN -LRB- (JJ red) -RRB-)) (VP jumped (PP over (NP it))) .)"
    assert tree.bracket_string == str(tree) == brackets
    assert tree.sentence == SENTENCE
    assert tree.leaves == ["The", "fox", "(", "red", ")", "jumped", "over", "it", "."]
    assert repr(tree) == f"ConstituentTree({brackets[:59]}…)"


def test_phrases(tree):
    assert tree.extract_all_phrases() == {
        "S": [SENTENCE],
        "NP": ["The fox (red)"],
        "PRN": ["(red)"],
        "VP": ["jumped over it"],
        "PP": ["over it"],
    }
    assert tree.extract_all_phrases(min_words_in_phrases=1)["NP"] == ["The fox (red)", "it"]
    assert set(tree.extract_all_phrases(min_words_in_phrases=4)) == {"S", "NP"}


def test_nested_phrases():
    inner = Tree("NP", 0, 3, (Tree("", 0, 1), Tree("", 2, 3)))
    outer = Tree("NP", 0, 5, (inner, Tree("", 4, 5)))
    tree = ConstituentTree("a b c d e", Answer(Tree("S", 0, 9, (outer, inner.moved(6)))))
    assert tree.extract_all_phrases()["NP"] == ["a b c", "a b", "d e"]
    assert tree.extract_all_phrases(avoid_nested_phrases=True)["NP"] == ["a b c", "d e"]


def test_nltk_tree(tree):
    pytest.importorskip("nltk")
    brackets = "(S (NP (DT The) (NN fox) (PRN ( (JJ red) ))) (VP jumped (PP over (NP it))) .)"
    assert " ".join(str(tree.nltk_tree).split()) == brackets
    assert tree.nltk_tree.leaves() == tree.leaves


def test_a_backend_by_name():
    assert ConstituentTree("It is.", "chunker").bracket_string == "(S (CLAUSE (CHUNK It) (CHUNK is) .))"
    with pytest.raises(TreelibError, match="there is no backend 'benpar'; there are benepar, chunker, tree-sitter"):
        ConstituentTree("It is.", "benpar")


@pytest.mark.parametrize("sentence", ["", " \n"])
def test_a_blank_sentence(sentence):
    with pytest.raises(TreelibError, match="a blank sentence has no tree"):
        ConstituentTree(sentence, "chunker")


def svg_of(tree):
    return draw_svg(tree.tree, tree.sentence)


def texts_of(svg):
    return [(element.get("class"), element.text) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_svg(tree):
    found = texts_of(svg_of(tree))
    assert [text for kind, text in found if kind == "word"] == tree.leaves
    assert [text for kind, text in found if kind == "constituent"] == ["S", "NP", "PRN", "VP", "PP", "NP"]
    assert [text for kind, text in found if kind == "tag"] == ["DT", "NN", "JJ"]


def test_svg_escapes_text():
    sentence = "<b>&\"x\"</b> <script>alert('1')</script> ]]> <!-- $x_1$"
    svg = draw_svg(Tree("<S> & \"'", 0, len(sentence), (Tree("<script>", 0, len(sentence)),)), sentence)
    assert texts_of(svg) == [("constituent", "<S> & \"'"), ("word", sentence), ("tag", "<script>")]
    assert re.findall(r"<(?!/?(?:svg|style|rect|path|text)\b|\?xml)", svg) == []


@pytest.mark.parametrize("text", [text for text in TEXTS.values() if text.strip()])
def test_every_text_makes_a_document(text):
    tree = ConstituentTree(text, "chunker")
    words = [text for kind, text in texts_of(svg_of(tree)) if kind == "word"]
    assert len(words) == len(tree.leaves)
    assert all(unicodedata.category(char) not in ("Cc", "Cs") for char in "".join(words))


def test_nothing_overlaps(tree):
    """Words stand side by side; each constituent stands between its first and its last word, above them."""
    picture = arrange(tree.tree, tree.sentence)
    words = [label for label in picture.labels if label.kind == "word"]
    for left, right in zip(words[:-1], words[1:], strict=True):
        assert left.x + 4 * len(left.text) < right.x - 4 * len(right.text) and left.y == right.y
    labels = {label.text: label for label in picture.labels}
    assert labels["over"].x < labels["PP"].x < labels["it"].x and labels["PP"].y < labels["over"].y


def test_labels_of_one_row_do_not_overlap():
    """A long label over a short word takes its place."""
    parts = tuple(Tree("expression_statement", place, place + 1, (Tree("", place, place + 1),)) for place in (0, 2, 4))
    picture = arrange(Tree("S", 0, 5, parts), "a b c")
    places = [label.x for label in picture.labels if label.text == "expression_statement"]
    assert all(right - left > 20 * 8 for left, right in zip(places[:-1], places[1:], strict=True))


def test_a_deep_tree_is_drawn():
    node = Tree("", 0, 1)
    for _ in range(2000):
        node = Tree("X", 0, 1, (node,))
    assert len(texts_of(draw_svg(node, "a"))) == 2001


def test_files(tree, tmp_path):
    pytest.importorskip("matplotlib")
    for ending in ("svg", "png", "txt"):
        tree.export_tree(tmp_path / f"tree.{ending}")
    assert (tmp_path / "tree.svg").read_text(encoding="utf-8") == svg_of(tree)
    assert (tmp_path / "tree.txt").read_text(encoding="utf-8") == tree.bracket_string + "\n"
    content = (tmp_path / "tree.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(content[place : place + 4], "big") for place in (16, 20))
    picture = arrange(tree.tree, tree.sentence)
    assert (width, height) == pytest.approx((2 * picture.width, 2 * picture.height), abs=2)


@pytest.mark.filterwarnings("error")
def test_a_png_of_what_the_font_does_not_have(tmp_path):
    pytest.importorskip("matplotlib")
    ConstituentTree("日本 👩‍👩‍👧 $x_1$ \0", "chunker").export_tree(tmp_path / "tree.png")
    assert (tmp_path / "tree.png").stat().st_size > 1000


def test_another_ending(tree, tmp_path):
    with pytest.raises(TreelibError, match=r"tree\.pdf: a tree is written as \.svg, \.png or \.txt"):
        tree.export_tree(tmp_path / "tree.pdf")
