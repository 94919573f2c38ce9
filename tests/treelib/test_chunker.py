# SPDX-License-Identifier: Apache-2.0
"""The built-in parser: words in any script, chunks and clauses of sentences worked out by hand."""

import random

import pytest

from constituent_treelib.chunker import Chunker, chunk_sentence, word_pattern
from treelib_cases import cuts_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The fox's well-known den", ["The", "fox's", "well-known", "den"]),
        ("don’t 'quote' dogs'", ["don’t", "'", "quote", "'", "dogs", "'"]),
        ("a--b -5 x_1", ["a", "-", "-", "b", "-", "5", "x_1"]),
        ("Hi, (you)!?", ["Hi", ",", "(", "you", ")", "!", "?"]),
        ("我爱 タワー", ["我", "爱", "タ", "ワ", "ー"]),
        ("한국어 문장", ["한국어", "문장"]),
        ("abc我def", ["abc", "我", "def"]),
        ("cafe\u0301 n\u0303o", ["cafe\u0301", "n\u0303o"]),
        ("हिन्दी", ["हिन्दी"]),
        ("می‌خواهم", ["می‌خواهم"]),
        ("👩‍👩‍👧‍👦👍🏽😀", ["👩‍👩‍👧‍👦", "👍🏽", "😀"]),
        ("❤️‍🔥🇩🇪🇫🇷1️⃣", ["❤️‍🔥", "🇩🇪", "🇫🇷", "1️⃣"]),
        ("soft\u00adhyphen", ["soft\u00adhyphen"]),
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
        ("It (you) is", "(S (CLAUSE (CHUNK It) (CHUNK -LRB- you -RRB-) (CHUNK is)))"),
        ("我爱北京，你呢？", "(S (CLAUSE (CHUNK 我 爱 北 京) ，) (CLAUSE (CHUNK 你 呢) ？))"),
        ("好,好。」好", "(S (CLAUSE (CHUNK 好) ,) (CLAUSE (CHUNK 好) 。 」) (CLAUSE (CHUNK 好)))"),
        ("What?! No", "(S (CLAUSE (CHUNK What) ? !) (CLAUSE (CHUNK No)))"),
        (",,, ,", "(S (CLAUSE , , , ,))"),
        ("and that", "(S (CLAUSE (CHUNK and that)))"),
        ("x", "(S (CLAUSE (CHUNK x)))"),
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


def test_macro_actions_of_the_example():
    """Four and five tokens, as with the phrases of a grammar."""
    text = "The quick fox jumped over the lazy dog."
    assert cuts_of(Chunker().parse([text]), text, cutoff=5) == [0, 4, 9]
