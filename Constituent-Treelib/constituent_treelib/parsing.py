# SPDX-License-Identifier: Apache-2.0
"""Texts → trees, one call for many texts; what a backend cannot parse the built-in chunker does."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from constituent_treelib.chunker import Chunker, chunk_sentence
from constituent_treelib.sentences import sentence_spans
from constituent_treelib.trees import Tree, is_sound

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A parser. Anything with these four can be given where a backend is wanted.

    Attributes:
        name: what the logs call it.
        version: of the program or model.
        unit: what `parse` wants to see: single sentences (natural language) or whole texts (programs). The tree of a
            text has the text's sentences (statements) as the children of its root.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def unit(self) -> Literal["sentence", "text"]: ...

    def parse(self, units: Sequence[str]) -> Sequence[Tree | None]:
        """One tree per unit, with positions in characters of that unit; None where it cannot be parsed.

        Leaves are in order and do not overlap; there may be gaps between them.
        """
        ...


@dataclass
class ParseCounts:
    """How many sentences (or programs) there were, were parsed, and fell back to the chunker, with the reasons."""

    sentences: int = 0
    parsed: int = 0
    fell_back: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def parse_texts(texts: Sequence[str], backend: Backend) -> tuple[list[list[Tree]], ParseCounts]:
    """Parses many texts with one call of the backend. Never raises for what a text holds.

    Args:
        texts: any strings.
        backend: the parser.

    Returns:
        Per text its trees in order, one per sentence, with positions in characters of the text: together the leaves
        are in order and do not overlap. And the counts. A blank text has no tree.
    """
    if type(backend) is Chunker:  # nothing to check, nothing to fall back to
        chunked = [chunk_text(text) for text in texts]
        total = sum(len(sentences) for sentences in chunked)
        return chunked, ParseCounts(sentences=total, parsed=total)
    units = [(number, start, end) for number, text in enumerate(texts) for start, end in _unit_spans(text, backend)]
    pieces = [texts[number][start:end] for number, start, end in units]
    parsed = _parse(pieces, backend)
    trees: list[list[Tree]] = [[] for _ in texts]
    for (number, start, _), piece, tree in zip(units, pieces, parsed, strict=True):
        if isinstance(tree, str):
            trees[number] += [part.moved(start) for part in chunk_text(piece)]
        else:
            moved = tree.moved(start)
            trees[number] += moved.children if backend.unit == "text" and moved.children else (moved,)
    reasons = Counter(reason for reason in parsed if isinstance(reason, str))
    return trees, ParseCounts(len(pieces), len(pieces) - reasons.total(), reasons.total(), reasons)


def chunk_text(text: str) -> list[Tree]:
    """The chunker's trees of a text, one per sentence."""
    return [chunk_sentence(text, start, end) for start, end in sentence_spans(text)]


def _unit_spans(text: str, backend: Backend) -> list[tuple[int, int]]:
    if backend.unit == "sentence":
        return sentence_spans(text)
    return [(0, len(text))] if text.strip() else []


def _parse(pieces: list[str], backend: Backend) -> list[Tree | str]:
    """Per unit the backend's tree, or why there is none of use."""
    if not pieces:
        return []
    try:
        found = list(backend.parse(list(pieces)))
    except Exception as error:  # a parser may fail in any way; the run goes on
        logger.warning("%s failed on %d sentences: %s: %s", backend.name, len(pieces), type(error).__name__, error)
        return [f"failed: {type(error).__name__}"] * len(pieces)
    if len(found) != len(pieces):
        return ["wrong number of trees"] * len(pieces)
    return [_checked(tree, len(piece)) for piece, tree in zip(pieces, found, strict=True)]


def _checked(tree: object, length: int) -> Tree | str:
    if tree is None:
        return "not parsed"
    try:
        return tree if isinstance(tree, Tree) and is_sound(tree, length) else "unsound tree"
    except Exception:  # positions that are no numbers, children that are no trees
        return "unsound tree"
