# SPDX-License-Identifier: Apache-2.0
"""The rule that turns trees into macro actions: on examples worked out by hand, and on anything.

For any ids of any kind of tokenizer, any words with gaps, any trees and any C: macro actions are a partition of the
tokens, no cut stands inside a character, and they are what the rule says, read word for word.
"""

import random
import re
from dataclasses import dataclass
from itertools import accumulate

import pytest

from macro_actions.constituents import macro_action_lengths
from macro_actions.token_text import TokenReader
from tokenizer_families import KINDS, TEXTS, Family


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


AB = Node(2, 4, (Node(2, 4),))
TWO = Node(0, 5, (Node(0, 2), Node(3, 5)))


@pytest.mark.parametrize(
    ("trees", "text", "spans", "trailing", "lengths"),
    [
        ([], "  \n", [(0, 1), (1, 3)], 1, [2, 1]),
        ([], "", [], 0, []),
        ([AB], "  ab  ", [(0, 1), (1, 4), (4, 5), (5, 6)], 0, [4]),
        ([TWO], "ab cd", [(0, 5)], 0, [1]),  # one token holds two words and belongs to the first
    ],
)
def test_tokens_without_a_word_and_words_without_a_token(trees, text, spans, trailing, lengths):
    assert macro_action_lengths(trees, text, spans, trailing, 5) == lengths


def test_a_tree_of_any_depth():
    node = Node(0, 1)
    for _ in range(5000):
        node = Node(0, 1, (node,))
    assert macro_action_lengths([Node(0, 3, (node, Node(2, 3)))], "a b", [(0, 1), (1, 3)], 0, 1) == [2]


@dataclass(frozen=True)
class Case:
    """A response and trees for it."""

    ids: list[int]
    text: str
    spans: tuple[tuple[int, int], ...]
    sentences: list[Node]
    trailing: int
    cutoff: int


def random_ids(family: Family, chance: random.Random) -> list[int]:
    """Any ids; texts; texts with other ids among them; characters torn apart."""
    kind = chance.randrange(4)
    everything = list(family.content)
    if kind == 0:
        return chance.choices(everything, k=chance.randrange(25))
    ids = [
        token
        for text in chance.choices(TEXTS, k=chance.randrange(1, 3))
        for token in family.tokenizer.encode(text, add_special_tokens=False)
    ]
    if kind == 2:
        for _ in range(chance.randrange(1, 6)):
            ids.insert(chance.randrange(len(ids) + 1), chance.choice(everything))
    if kind == 3:
        ids = [token for token in ids if chance.random() < 0.7]
    return ids[: chance.randrange(1, 40)]


def random_sentences(length: int, chance: random.Random) -> list[Node]:
    """Trees over words that are any stretches of the text, in order; or no tree."""
    count = chance.randrange(min(length, 12) + 1)
    bounds = sorted(chance.sample(range(length + 1), min(2 * count, length + 1)))
    words = [Node(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=False)]
    if words and chance.random() < 0.5:  # words without gaps
        words = [Node(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]
    sentences = []
    while words:
        size = chance.randrange(1, len(words) + 1)
        sentences.append(random_tree(words[:size], chance))
        words = words[size:]
    return sentences


def random_tree(words: list[Node], chance: random.Random) -> Node:
    """Any tree over words: flat, deep, with chains of single children."""
    if len(words) == 1 and chance.random() < 0.6:
        return words[0]
    inner = sorted(chance.sample(range(1, len(words)), chance.randrange(len(words))))
    bounds = [0, *inner, len(words)]
    parts = [words[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
    if len(parts) == 1:
        children = tuple(words) if len(words) > 1 else (random_tree(words, chance),)
    else:
        children = tuple(random_tree(part, chance) for part in parts)
    return Node(words[0].start, words[-1].end, children)


def random_case(family: Family, read: TokenReader, chance: random.Random) -> Case:
    ids = random_ids(family, chance)
    text = read(ids)
    sentences = random_sentences(len(text.text), chance)
    return Case(ids, text.text, text.spans, sentences, chance.randrange(3), chance.randrange(1, 12))


def words_of(node: Node) -> list[Node]:
    return [word for child in node.children for word in words_of(child)] if node.children else [node]


def owners(case: Case) -> list[int]:
    """Per token the number of its word. A token that goes on with a character belongs where the one before does."""
    words = [word for sentence in case.sentences for word in words_of(sentence)]
    found: list[int] = []
    for number, (start, end) in enumerate(case.spans):
        if number and start < case.spans[number - 1][1]:
            found.append(found[-1])
            continue
        anchor = next((i for i in range(start, end) if not case.text[i].isspace()), end)
        found.append(next((i for i, word in enumerate(words) if word.end > anchor), len(words) - 1))
    return found


def cuts_of(case: Case) -> list[int]:
    """The rule as it is written down, recursion and all."""
    n = len(case.spans)
    cuts = {0, n, n + case.trailing}
    owner = owners(case)
    base = first = 0
    for sentence in case.sentences:
        count = len(words_of(sentence))
        numbers = {id(word): first + i for i, word in enumerate(words_of(sentence))}
        ends: list[int] = []
        pos = 0

        def tokens(x, numbers=numbers):
            return sum(owner.count(numbers[id(word)]) for word in words_of(x))

        def visit(x, ends=ends, tokens=tokens):
            nonlocal pos
            if len(words_of(x)) == 1:
                pos += tokens(x)
                if not ends:
                    ends.append(pos)
                else:
                    ends[-1] = pos
            elif tokens(x) < case.cutoff:
                pos += tokens(x)
                ends.append(pos)
            else:
                for child in x.children:
                    visit(child)

        visit(sentence)
        cuts |= {base, base + tokens(sentence), *(base + end for end in ends)}
        base += tokens(sentence)
        first += count
    return sorted(cuts)


def inside_a_character(content: bytes, position: int) -> bool:
    """Whether a text says something else in two parts than as a whole."""
    parts = [part.decode("utf-8", errors="replace") for part in (content[:position], content[position:])]
    return "".join(parts) != content.decode("utf-8", errors="replace")


def check(family: Family, case: Case, characters: bool) -> None:
    """Macro actions are a partition, as the rule says, and, where `characters` is set, cut no character in two."""
    lengths = macro_action_lengths(case.sentences, case.text, case.spans, case.trailing, case.cutoff)
    assert all(length > 0 for length in lengths)
    cuts = [0, *accumulate(lengths)]
    assert cuts[-1] == len(case.ids) + case.trailing
    content = family.bytes_of(case.ids)
    for cut in cuts if characters else ():
        assert not inside_a_character(content, len(family.bytes_of(case.ids[:cut])))
    assert cuts == (cuts_of(case) if case.ids or case.trailing else [0])


def run(name: str, family: Family, count: int) -> None:
    read = TokenReader(family.tokenizer)
    for seed in range(count):
        case = random_case(family, read, random.Random(f"{name} {seed}"))
        try:
            check(family, case, characters=name != "word pieces")  # each of them holds whole characters
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}: {case}") from error


@pytest.mark.parametrize("name", KINDS)
def test_partition(name):
    run(name, KINDS[name](), 200)
