# SPDX-License-Identifier: Apache-2.0
"""Trees and sentences; the built-in parser: words in any script, chunks and clauses worked out by hand."""

import random

import pytest

from constituent_treelib.chunker import Chunker, chunk_sentence, sentence_spans, word_pattern
from constituent_treelib.trees import Tree, is_sound
from treelib_cases import flat_tree


@pytest.mark.parametrize(
    ("word", "shown"), [('"(a', '"-LRB-a'), ("))", "-RRB--RRB-"), ("a b", "a_b"), ("“x”", "“x”"), ("'", "'")]
)
def test_brackets_and_quotes_in_words(word, shown):
    assert flat_tree([(0, len(word))]).bracket_string(word) == f"(S {shown})"


def test_any_depth():
    deep = Tree("", 0, 1)
    for _ in range(5_000):
        deep = Tree("X", 0, 1, (deep,))
    tree = Tree("S", 0, 3, (deep, Tree("", 2, 3))).moved(4)
    assert [(leaf.start, leaf.end) for leaf in tree.leaves()] == [(4, 5), (6, 7)]
    assert is_sound(tree, 7)
    assert tree.bracket_string("    a b").endswith(" b)")


@pytest.mark.parametrize(
    ("spans", "sound"),
    [
        ([(0, 1), (1, 2), (3, 5)], True),
        ([(0, 2), (1, 3)], False),
        ([(0, 0), (0, 1)], False),
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
        (" \n\t\u00a0", []),
        ("One. Two", ["One.", "Two"]),
        ("  One!  Two?\tThree ", ["One!", "Two?", "Three"]),
        ("One\nTwo\r\nThree\rFour\u2028Five", ["One", "Two", "Three", "Four", "Five"]),
        ('He said "go." Then (he left.) Then', ['He said "go."', "Then (he left.)", "Then"]),
        ("3.14 is example.com", ["3.14 is example.com"]),
        ("One.\u00a0Two", ["One.", "Two"]),
        ("。你好！吗", ["。你好！吗"]),
    ],
)
def test_sentence_spans(text, sentences):
    assert [text[start:end] for start, end in sentence_spans(text)] == sentences


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The fox's well-known den", ["The", "fox's", "well-known", "den"]),
        ("don’t 'quote' dogs'", ["don’t", "'", "quote", "'", "dogs", "'"]),
        ("a--b -5 x_1", ["a", "-", "-", "b", "-", "5", "x_1"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("abc我def", ["abc", "我", "def"]),
        ("cafe\u0301 n\u0303o", ["cafe\u0301", "n\u0303o"]),
        ("می‌خواهم", ["می‌خواهم"]),
        ("👩‍👩‍👧‍👦👍🏽😀", ["👩‍👩‍👧‍👦", "👍🏽", "😀"]),
        ("❤️‍🔥🇩🇪🇫🇷1️⃣", ["❤️‍🔥", "🇩🇪", "🇫🇷", "1️⃣"]),
        ("a\u200bb", ["a", "\u200b", "b"]),
        ("\0a\ud800\ufffd", ["\0", "a", "\ud800", "\ufffd"]),
        (" \u00a0\t\n", []),
    ],
)
def test_words(text, words):
    assert word_pattern().findall(text) == words


def test_the_pattern_for_ascii_finds_the_same_words():
    letters = "".join(map(chr, range(128))) + "aab  ''--"
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choice(letters) for _ in range(20))
        assert word_pattern(True).findall(text) == word_pattern().findall(text), repr(text)


@pytest.mark.parametrize(
    ("sentence", "brackets"),
    [
        (
            "The quick fox jumped over the lazy dog.",
            "(S (CLAUSE (CHUNK The quick fox jumped) (CHUNK over the lazy dog) .))",
        ),
        (
            "She said that it would rain, but I stayed.",
            "(S (CLAUSE (CHUNK She) (CHUNK said)) (CLAUSE (CHUNK that it) (CHUNK would rain) ,) "
            "(CLAUSE (CHUNK but I) (CHUNK stayed) .))",
        ),
        ("CATS AND dogs; The End", "(S (CLAUSE (CHUNK CATS)) (CLAUSE (CHUNK AND dogs) ;) (CLAUSE (CHUNK The End)))"),
        ("We’re sure you don't know him", "(S (CLAUSE (CHUNK We’re) (CHUNK sure you) (CHUNK don't know him)))"),
        (
            'Stop! "Go," he said (to her).',
            '(S (CLAUSE (CHUNK Stop) !) (CLAUSE (CHUNK " Go) , ") '
            "(CLAUSE (CHUNK he) (CHUNK said) (CHUNK -LRB- to her -RRB-) .))",
        ),
        ("It costs 3.14 at example.com.", "(S (CLAUSE (CHUNK It) (CHUNK costs 3 . 14) (CHUNK at example . com) .))"),
        ("我爱北京，你呢？", "(S (CLAUSE (CHUNK 我 爱 北 京) ，) (CLAUSE (CHUNK 你 呢) ？))"),
        ("好,好。」好", "(S (CLAUSE (CHUNK 好) ,) (CLAUSE (CHUNK 好) 。 」) (CLAUSE (CHUNK 好)))"),
        (",,, ,", "(S (CLAUSE , , , ,))"),
        ("google.com/that?if=1", "(S (CLAUSE (CHUNK google . com / that ? if = 1)))"),
        ("and/or that U.S.A", "(S (CLAUSE (CHUNK and / or)) (CLAUSE (CHUNK that U . S . A)))"),
        ("no...yes", "(S (CLAUSE (CHUNK no) . . .) (CLAUSE (CHUNK yes)))"),
        (
            "He left (because it rained).",
            "(S (CLAUSE (CHUNK He) (CHUNK left)) (CLAUSE (CHUNK -LRB- because it) (CHUNK rained -RRB-) .))",
        ),
        ('He said "that is it".', '(S (CLAUSE (CHUNK He) (CHUNK said)) (CLAUSE (CHUNK " that is it ") .))'),
        ("I came,but he left", "(S (CLAUSE (CHUNK I) (CHUNK came ,)) (CLAUSE (CHUNK but he) (CHUNK left)))"),
        ('We saw ("the cat") today.', '(S (CLAUSE (CHUNK We) (CHUNK saw) (CHUNK -LRB- " the cat " -RRB- today) .))'),
        (
            "He left--because it rained",
            "(S (CLAUSE (CHUNK He) (CHUNK left - -)) (CLAUSE (CHUNK because it) (CHUNK rained)))",
        ),
    ],
)
def test_trees_by_hand(sentence, brackets):
    (tree,) = Chunker().parse([sentence])
    assert tree.bracket_string(sentence) == brackets


def test_positions_count_in_the_text():
    text = "No. He ran over it."
    assert chunk_sentence(text, 4, 19) == chunk_sentence(text[4:], 0, 15).moved(4)


def test_blank_sentences_have_no_tree():
    assert Chunker().parse(["", " \n", "a"])[:2] == [None, None]
