# SPDX-License-Identifier: Apache-2.0
"""Many texts in one call: positions, backends that fail in every way or are one's own, and texts of every kind."""

import pytest

from constituent_treelib import make_backend
from constituent_treelib.chunker import Chunker
from constituent_treelib.parsing import chunk_text, parse_texts
from constituent_treelib.trees import Tree
from treelib_cases import TEXTS, check_trees, flat_tree

TEXT = "One fox. Two dogs!"
CHUNKED = ["(S (CLAUSE (CHUNK One fox) .))", "(S (CLAUSE (CHUNK Two dogs) !))"]


class Own:
    """A user's backend: calls a function for each unit, or for all."""

    name, version = "own", "1"

    def __init__(self, one=None, many=None, unit="sentence"):
        self.unit, self.seen = unit, []
        self._one, self._many = one, many

    def parse(self, units):
        self.seen.append(list(units))
        return self._many(units) if self._many else [self._one(unit) for unit in units]


def letters(unit):
    """Every character that is not blank is a word."""
    return flat_tree([(place, place + 1) for place, char in enumerate(unit) if not char.isspace()], "LETTERS")


def brackets(trees, text):
    return [tree.bracket_string(text) for tree in trees]


def test_the_chunker():
    trees, counts = parse_texts([TEXT, "", " \n", "Yes"], Chunker())
    assert brackets(trees[0], TEXT) == CHUNKED
    assert trees[1:3] == [[], []]
    assert brackets(trees[3], "Yes") == ["(S (CLAUSE (CHUNK Yes)))"]
    assert (counts.sentences, counts.parsed, counts.fell_back, dict(counts.reasons)) == (3, 3, 0, {})
    assert brackets(chunk_text(TEXT), TEXT) == CHUNKED


def test_one_call_for_all_sentences_and_positions_in_the_texts():
    own = Own(letters)
    trees, counts = parse_texts(["ab. c\n", "", " d e"], own)
    assert own.seen == [["ab.", "c", "d e"]]
    assert [[(leaf.start, leaf.end) for leaf in tree.leaves()] for tree in trees[0]] == [
        [(0, 1), (1, 2), (2, 3)],
        [(4, 5)],
    ]
    assert [(leaf.start, leaf.end) for leaf in trees[2][0].leaves()] == [(1, 2), (3, 4)]
    assert (counts.sentences, counts.parsed, counts.fell_back) == (3, 3, 0)


def test_whole_texts():
    """The children of a text's tree are its sentences; a tree without children is one."""

    def lines(unit):
        if "\n" not in unit:
            return Tree("LINE", 0, len(unit))
        middle = unit.index("\n")
        return Tree("TEXT", 0, len(unit), (Tree("LINE", 0, middle), Tree("LINE", middle + 1, len(unit))))

    own = Own(lines, unit="text")
    trees, counts = parse_texts(["a b. c\nd", "  \n", "e f"], own)
    assert own.seen == [["a b. c\nd", "e f"]]
    assert [[(tree.start, tree.end) for tree in sentences] for sentences in trees] == [[(0, 6), (7, 8)], [], [(0, 3)]]
    assert (counts.sentences, counts.parsed) == (2, 2)


def test_nothing_to_parse_calls_nobody():
    own = Own(letters)
    assert parse_texts(["", " "], own)[0] == [[], []]
    assert own.seen == []


def fails(units):
    raise RuntimeError("out of words")


def stops(units):
    yield letters(units[0])
    raise MemoryError


class Strange:
    """Looks like a tree, and is none."""

    children = ()


@pytest.mark.parametrize(
    ("many", "reason"),
    [
        (fails, "failed: RuntimeError"),
        (stops, "failed: MemoryError"),
        (lambda units: None, "failed: TypeError"),
        (lambda units: [letters(units[0])], "wrong number of trees"),
        (lambda units: [None for _ in units], "not parsed"),
        (lambda units: [flat_tree([(2, 3), (0, 1)]) for _ in units], "unsound tree"),
        (lambda units: [Tree("S", 0, 1, (Tree("", None, 1),)) for _ in units], "unsound tree"),
        (lambda units: [Strange() for _ in units], "unsound tree"),
    ],
)
def test_what_a_backend_cannot_do_the_chunker_does(many, reason):
    trees, counts = parse_texts([TEXT], Own(many=many))
    assert brackets(trees[0], TEXT) == CHUNKED
    assert (counts.sentences, counts.parsed, counts.fell_back) == (2, 0, 2)
    assert dict(counts.reasons) == {reason: 2}


def test_a_sentence_that_raises_costs_no_other(monkeypatch, caplog):
    """Three sentences in one call; the second raises."""

    def parse(unit):
        if "dogs" in unit:
            raise KeyError("dogs")
        return letters(unit)

    monkeypatch.setattr("constituent_treelib.parsing._have_failed", set())
    own = Own(parse)
    trees, counts = parse_texts([f"{TEXT} a b."], own)
    assert [tree.label == "LETTERS" for tree in trees[0]] == [True, False, True]
    assert (counts.parsed, dict(counts.reasons)) == (2, {"failed: KeyError": 1})
    parse_texts([TEXT], own)
    assert len(caplog.records) == 1, "a second failure is no warning"
    assert "failed on 1 of 3 sentences, first with KeyError" in caplog.text


def test_a_backend_may_change_its_list():
    def empties(units):
        found = [letters(unit) for unit in units]
        units.clear()
        return found

    assert parse_texts([TEXT], Own(many=empties))[1].parsed == 2


def test_a_text_that_is_not_parsed_has_the_chunkers_sentences():
    trees, counts = parse_texts([TEXT], Own(lambda unit: None, unit="text"))
    assert brackets(trees[0], TEXT) == CHUNKED
    assert (counts.sentences, counts.fell_back) == (1, 1)


@pytest.fixture(scope="module", params=["chunker", "tree-sitter"])
def any_backend(request):
    if request.param == "tree-sitter":
        pytest.importorskip("tree_sitter_python")
    return make_backend(request.param)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_text(any_backend, text):
    """Every visible character is in a word."""
    texts = [text, "A fox. " + text]
    trees, counts = parse_texts(texts, any_backend)
    assert counts.sentences == counts.parsed + counts.fell_back
    assert bool(trees[0]) == bool(text.strip())
    for found, whole in zip(trees, texts, strict=True):
        check_trees(found, whole)
        words = [whole[leaf.start : leaf.end] for tree in found for leaf in tree.leaves()]
        assert "".join("".join(words).split()) == "".join(whole.split())
