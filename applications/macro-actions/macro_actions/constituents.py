# SPDX-License-Identifier: Apache-2.0
"""The termination condition `parsing`: macro actions that are constituents of a parse tree.

The rule, from trees and tokens to macro-action lengths, with a cutoff of C tokens:

    for each sentence: visit(root), where visit(x) is
        one word under x:             its tokens join the macro action before it; a sentence's first word starts one
        fewer than C tokens under x:  they are one macro action
        otherwise:                    visit the children, from left to right

A token belongs to the first word that ends after the token's first visible character, and to the last word if there
is none. A token that shares a character with the token before it belongs to the same word. Sentence boundaries are
always cut points, and special tokens at the end (EOS) are one more macro action.

A smaller C does not always give shorter macro actions, because single words join what is before them: with one token
per word, ((I) ((saw) ((the) (dog)))) is one macro action of four tokens at C = 2, but 2 2 at C = 3 and 1 3 at C = 4.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

from macro_actions.token_text import TokenReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from constituent_treelib.parsing import Backend, ParseCounts

logger = logging.getLogger(__name__)

ENOUGH_TO_JUDGE = 20  # sentences; with fewer, the share that fell back to the chunker means little


class Node(Protocol):
    """A constituent, or a word if it has no children. Positions are characters of the text.

    `children` are the same objects at every access: numbers of words are kept by their identity.
    """

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def children(self) -> Sequence[Node]: ...


def macro_action_lengths(
    sentences: Sequence[Node], text: str, spans: Sequence[tuple[int, int]], trailing: int, cutoff: int
) -> list[int]:
    """Cut one response along its parse trees.

    Example: ((The small dog) (chased cats)) with one token per word and EOS. C = 4 makes both phrases macro actions,
    lengths 3 2 1; C = 6 makes the sentence one, lengths 5 1.

    Args:
        sentences: trees of the text, in order; none if the text has no words.
        text: what the tokens decode to.
        spans: (start, end) in characters of each of the n tokens before the trailing special ones. Neither start nor
            end ever decreases. Tokens that share a character overlap.
        trailing: number of special tokens at the end.
        cutoff: C; a constituent of fewer tokens is one macro action.

    Returns:
        Lengths in tokens, each at least 1, with sum n + trailing.
    """
    # tokens_before[w] is the number of tokens before word w of the response; the last entry counts all tokens.
    nodes_by_sentence = [_nodes(sentence) for sentence in sentences]
    word_ends: list[int] = []
    for nodes in nodes_by_sentence:
        for node in nodes:
            if not node.children:
                word_ends.append(node.end)
    tokens_per_word = _tokens_per_word(text, spans, word_ends)
    tokens_before = list(accumulate(tokens_per_word, initial=0))

    # Cut points, as numbers of tokens before them. Equal ones, as in an empty response, are one.
    cuts = {0, len(spans), len(spans) + trailing}
    first_word = 0
    for nodes in nodes_by_sentence:
        root = nodes[0]
        words_under = _words_under(nodes)
        cuts.add(tokens_before[first_word])
        cuts.update(_visit(root, first_word, words_under, tokens_before, cutoff))
        first_word += words_under[id(root)]
        cuts.add(tokens_before[first_word])
    return [end - start for start, end in pairwise(sorted(cuts))]


def _nodes(root: Node) -> list[Node]:
    """Every node of a tree, each before its children, from left to right."""
    nodes = []
    stack = [root]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(reversed(node.children))
    return nodes


def _words_under(nodes: Sequence[Node]) -> dict[int, int]:
    """Number of words under each node of a tree, by the node's id.

    Args:
        nodes: all nodes of the tree, see `_nodes`.
    """
    counts: dict[int, int] = {}
    for node in reversed(nodes):  # children before parents
        if node.children:
            counts[id(node)] = sum(counts[id(child)] for child in node.children)
        else:
            counts[id(node)] = 1
    return counts


def _visit(
    root: Node, first_word: int, words_under: Mapping[int, int], tokens_before: Sequence[int], cutoff: int
) -> list[int]:
    """The rule's visit(root). It keeps a stack of nodes, because recursion would fail on deep trees.

    Args:
        root: root of a sentence.
        first_word: number of the sentence's first word in the response.
        words_under: see `_words_under`.
        tokens_before: tokens before each word of the response, and after the last.
        cutoff: C.

    Returns:
        Where the macro actions of the sentence end: the number of tokens before each end.
    """
    ends: list[int] = []
    word = first_word
    stack = [root]
    while stack:
        node = stack.pop()
        next_word = word + words_under[id(node)]
        start = tokens_before[word]
        end = tokens_before[next_word]
        if next_word == word + 1:
            if ends:
                ends[-1] = end  # the word joins the macro action before it
            else:
                ends.append(end)
            word = next_word
        elif end - start < cutoff:
            ends.append(end)
            word = next_word
        else:
            stack.extend(reversed(node.children))
    return ends


def _tokens_per_word(text: str, spans: Sequence[tuple[int, int]], word_ends: Sequence[int]) -> list[int]:
    """Number of tokens that belong to each word.

    Args:
        text: what the tokens decode to.
        spans: (start, end) in characters of each token.
        word_ends: exclusive end of each word, in characters. Without words the result is empty.
    """
    counts = [0] * len(word_ends)
    if not counts:
        return counts
    last_word = len(counts) - 1
    word = 0
    covered = 0  # end of the text that earlier tokens cover
    for start, end in spans:
        shares_a_character = start < covered
        if not shares_a_character:
            position = anchor(text, start, end)
            while word < last_word and word_ends[word] <= position:
                word += 1
        covered = max(covered, end)
        counts[word] += 1
    return counts


def anchor(text: str, start: int, end: int) -> int:
    """Position that decides to which word a token belongs: its first visible character, or its end if it is blank."""
    while start < end and text[start].isspace():
        start += 1
    return start


@dataclass(frozen=True)
class ParsedLengths:
    """Macro actions of a rollout, and how well its text was parsed.

    Attributes:
        lengths: per row the lengths of its macro actions in tokens.
        counts: how many sentences there were, how many were parsed, and how many fell back to the chunker.
        seconds: wall time of reading and parsing.
    """

    lengths: list[list[int]]
    counts: ParseCounts
    seconds: float


class ParsingCondition:
    """Cuts responses along constituents of fewer than `cutoff` tokens."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, backend: Backend, cutoff: int, end_ids: Collection[int] = ()
    ) -> None:
        """Read the tokenizer's vocabulary once.

        Args:
            tokenizer: the policy's.
            backend: the parser.
            cutoff: C, in tokens.
            end_ids: ids that end a response, in addition to the tokenizer's special ids.
        """
        self.backend = backend
        self._cutoff = cutoff
        self._read = TokenReader(tokenizer)
        self._end_ids = frozenset(self._read.end_ids) | frozenset(end_ids)
        self._warned = False

    def __call__(self, rows: Sequence[Sequence[int]]) -> ParsedLengths:
        """Cut the responses of a rollout.

        Args:
            rows: per response its ids, EOS included, without padding.
        """
        from constituent_treelib.parsing import parse_texts  # only this condition needs the package

        start = time.perf_counter()
        trailing_counts = [self._count_trailing(row) for row in rows]
        responses = []
        for row, trailing in zip(rows, trailing_counts, strict=True):
            responses.append(self._read(row[: len(row) - trailing]))
        trees, counts = parse_texts([response.text for response in responses], self.backend)

        lengths = []
        for sentences, response, trailing in zip(trees, responses, trailing_counts, strict=True):
            row_lengths = macro_action_lengths(sentences, response.text, response.spans, trailing, self._cutoff)
            lengths.append(row_lengths)
        self._warn_once(counts)
        return ParsedLengths(lengths, counts, time.perf_counter() - start)

    def _count_trailing(self, row: Sequence[int]) -> int:
        """Number of ids at the end of a row that end a response."""
        count = 0
        while count < len(row) and row[len(row) - 1 - count] in self._end_ids:
            count += 1
        return count

    def _warn_once(self, counts: ParseCounts) -> None:
        """Warn when more than half of the sentences fell back to the chunker, which then made most macro actions."""
        enough = counts.sentences >= ENOUGH_TO_JUDGE
        if self._warned or not enough or counts.fell_back <= counts.sentences / 2:
            return
        self._warned = True
        reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.reasons.most_common())
        logger.warning(
            "parser %s: %d of %d %ss fell back to the chunker (%s)",
            self.backend.name,
            counts.fell_back,
            counts.sentences,
            self.backend.unit,
            reasons,
        )
