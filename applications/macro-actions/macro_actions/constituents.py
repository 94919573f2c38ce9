# SPDX-License-Identifier: Apache-2.0
"""The termination condition `parsing`: macro actions from constituency trees, a whole rollout at a time.

The rule, from trees and tokens to macro-action lengths:

    for each sentence: visit(root), where visit(x) is
        one word under x:             its tokens join the macro action before it; a sentence's first word starts one
        fewer than C tokens under x:  they are one macro action
        otherwise:                    visit the children, from left to right

A token belongs to the first word that ends after the token's first visible character; one that goes on with a
character of the token before belongs where that one does. Cuts stand between sentences, too; special tokens at the end
(EOS) are one more macro action.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import TYPE_CHECKING, Protocol

from macro_actions.token_text import TokenReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from constituent_treelib.parsing import Backend, ParseCounts

logger = logging.getLogger(__name__)

ENOUGH_TO_JUDGE = 20  # sentences; of fewer, a share that fell back says little


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
    nodes = [_nodes(sentence) for sentence in sentences]
    word_ends = [node.end for sentence in nodes for node in sentence if not node.children]
    before = [0, *accumulate(_tokens_per_word(text, spans, word_ends))]  # tokens before each word, and in all
    cuts = {0, len(spans), len(spans) + trailing}
    word = 0
    for sentence in nodes:
        ends, next_word = _visit(sentence[0], word, _words_under(sentence), before, cutoff)
        cuts.update([before[word], *ends, before[next_word]])
        word = next_word
    return [end - start for start, end in pairwise(sorted(cuts))]


def _nodes(root: Node) -> list[Node]:
    """Every node, each before its children, from left to right."""
    nodes, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting.extend(reversed(node.children))
    return nodes


def _words_under(nodes: Sequence[Node]) -> dict[int, int]:
    """How many words are under each node of a tree, by the node's id."""
    counts: dict[int, int] = {}
    for node in reversed(nodes):  # children before parents
        counts[id(node)] = sum([counts[id(child)] for child in node.children]) or 1
    return counts


def _visit(
    root: Node, word: int, words_under: Mapping[int, int], before: Sequence[int], cutoff: int
) -> tuple[list[int], int]:
    """The rule's visit(root). A list of waiting nodes stands in for the recursion, which deep trees would exhaust.

    Args:
        root: of a sentence.
        word: number of the sentence's first word in the response.
        words_under: see `_words_under`.
        before: tokens before each word of the response, and after the last.

    Returns:
        Where the macro actions end, in tokens, and the number of the word after the sentence.
    """
    ends: list[int] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        next_word = word + words_under[id(node)]
        if next_word == word + 1:
            ends[-1:] = [before[next_word]]  # moves the last end behind this word, or sets the sentence's first end
        elif before[next_word] - before[word] < cutoff:
            ends.append(before[next_word])
        else:
            waiting.extend(reversed(node.children))
            continue
        word = next_word
    return ends, word


def _tokens_per_word(text: str, spans: Sequence[tuple[int, int]], word_ends: Sequence[int]) -> list[int]:
    """How many tokens belong to each word, given the character after its last; without words, none."""
    counts = [0] * len(word_ends)
    word, last_word, covered = 0, len(counts) - 1, 0
    for start, end in spans if counts else ():
        if start >= covered:  # else the token goes on with a character of the one before and belongs where that does
            position = anchor(text, start, end)
            while word < last_word and word_ends[word] <= position:
                word += 1
        covered = max(covered, end)
        counts[word] += 1
    return counts


def anchor(text: str, start: int, end: int) -> int:
    """The position that decides to which word a token belongs: its first visible character; without one, its end."""
    while start < end and text[start].isspace():
        start += 1
    return start


@dataclass(frozen=True)
class ParsedLengths:
    """Where the responses of a rollout were cut, and how well their text was parsed."""

    lengths: list[list[int]]  # per row the lengths of its macro actions in tokens
    counts: ParseCounts  # how many sentences there were, were parsed and fell back to the chunker
    seconds: float  # wall time of it all


class ParsingCondition:
    """Cuts responses along constituents of fewer than `cutoff` tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, backend: Backend, cutoff: int, end_ids: Collection[int] = ()
    ) -> None:
        """Reads the tokenizer once.

        Args:
            cutoff: C, in tokens.
            end_ids: ids that end a response beside the tokenizer's special ones.
        """
        self.backend, self._cutoff = backend, cutoff
        self._read = TokenReader(tokenizer)
        self._warned = False
        self._ending = frozenset(self._read.special_ids) | frozenset(end_ids)

    def __call__(self, rows: Sequence[Sequence[int]]) -> ParsedLengths:
        """Cuts the responses of a rollout.

        Args:
            rows: per response its ids, EOS included, without padding.
        """
        from constituent_treelib.parsing import parse_texts  # installed for this condition only

        start = time.perf_counter()
        trailing = [len(list(takewhile(self._ending.__contains__, reversed(row)))) for row in rows]
        read = [self._read(row[: len(row) - count]) for row, count in zip(rows, trailing, strict=True)]
        trees, counts = parse_texts([item.text for item in read], self.backend)
        lengths = [
            macro_action_lengths(sentences, item.text, item.spans, count, self._cutoff)
            for sentences, item, count in zip(trees, read, trailing, strict=True)
        ]
        self._warn_once(counts)
        return ParsedLengths(lengths, counts, time.perf_counter() - start)

    def _warn_once(self, counts: ParseCounts) -> None:
        """Warns when more than half of the sentences fell back: the macro actions are then mostly the chunker's."""
        if not self._warned and counts.sentences >= ENOUGH_TO_JUDGE and counts.fell_back > counts.sentences / 2:
            self._warned = True
            reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.reasons.most_common())
            logger.warning(
                "parser %s: %d of %d %ss fell back to the chunker (%s)",
                *(self.backend.name, counts.fell_back, counts.sentences, self.backend.unit, reasons),
            )
