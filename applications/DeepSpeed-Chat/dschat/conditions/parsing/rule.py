# SPDX-License-Identifier: Apache-2.0
"""The rule: from trees and tokens to macro-action lengths.

    for each sentence: visit(root), where visit(x) is
        one word under x:             its tokens join the macro action before it; a sentence's first word starts one
        fewer than C tokens under x:  they are one macro action
        otherwise:                    visit the children, from left to right

A token belongs to the first word that ends after the token's first visible character; one that goes on with a
character of the token before belongs where that one does. Cuts stand between sentences, too; special tokens at the end
(EOS) are one more macro action. Pure Python: no torch, no tokenizer, no parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol


class Node(Protocol):
    """A constituent, or a word if it has no children; positions in characters."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def children(self) -> Sequence[Node]: ...


def macro_action_lengths(
    sentences: Sequence[Node], text: str, spans: Sequence[tuple[int, int]], trailing: int, cutoff: int
) -> list[int]:
    """Cuts one response.

    Args:
        sentences: trees of the text, in order; none if it holds no word.
        text: what the tokens say.
        spans: (start, end) in characters of each of the n tokens before the trailing special ones; neither start nor
            end ever decreases. Tokens that share a character overlap.
        trailing: number of special tokens at the end.
        cutoff: C; a constituent of fewer tokens is one macro action.

    Returns:
        Lengths in tokens, each at least 1, with sum n + trailing.
    """
    n = len(spans)
    cuts = {0, n, n + trailing}
    flat = [_flattened(sentence) for sentence in sentences]
    ends = accumulate((node.end for nodes, _ in flat for node in nodes if not node.children), max)
    counts = _tokens_per_word(text, spans, list(ends))
    base = first = 0
    for nodes, num_words in flat:
        below = num_words[0]
        total = [0, *accumulate(counts[first : first + below])]
        cuts.add(base)
        cuts.update(base + end for end in _ends(nodes, num_words, total, cutoff))
        base, first = base + total[below], first + below
        cuts.add(base)
    return [end - start for start, end in pairwise(sorted(cuts))]


def anchor(text: str, span: tuple[int, int]) -> int:
    """The position that decides to which word a token belongs: its first visible character; else its end."""
    position, end = span
    while position < end and text[position].isspace():
        position += 1
    return position


def _flattened(sentence: Node) -> tuple[list[Node], list[int]]:
    """Every node, each before its children, from left to right, and how many words are under it.

    Without recursion: trees may be deep.
    """
    nodes, stack = [], [sentence]
    while stack:
        node = stack.pop()
        nodes.append(node)
        if node.children:
            stack.extend(reversed(node.children))
    num_words = [1] * len(nodes)
    waiting: list[int] = []  # words under the nodes that have no parent yet, from right to left
    for index in range(len(nodes) - 1, -1, -1):
        children = len(nodes[index].children)
        if children:
            num_words[index] = sum(waiting[-children:])
            del waiting[-children:]
        waiting.append(num_words[index])
    return nodes, num_words


def _tokens_per_word(text: str, spans: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """How many tokens belong to each word; without words, none.

    Args:
        ends: per word the character after its last.
    """
    counts = [0] * len(ends)
    if not counts:
        return counts
    word, last, covered = 0, len(ends) - 1, 0
    for span in spans:
        if span[0] >= covered:
            position = anchor(text, span)
            while word < last and ends[word] <= position:
                word += 1
        counts[word] += 1
        if span[1] > covered:
            covered = span[1]
    return counts


def _ends(nodes: Sequence[Node], num_words: Sequence[int], total: Sequence[int], cutoff: int) -> list[int]:
    """Where the macro actions of a sentence end, in tokens from its start.

    Args:
        nodes: each before its children, from left to right.
        num_words: words under each.
        total: tokens before each word, and all of them at the end.
        cutoff: C.
    """
    ends: list[int] = []
    word = done = 0  # the next word, and how many words to come are in a macro action already
    for node, below in zip(nodes, num_words, strict=True):
        if done:
            done -= not node.children
            continue
        if below == 1:
            ends[-1:] = [total[word + 1]]  # appends where there is none yet
        elif total[word + below] - total[word] < cutoff:
            ends.append(total[word + below])
        else:
            continue
        word += below
        done = below if node.children else 0
    return ends
