# SPDX-License-Identifier: Apache-2.0
"""Texts → trees with a backend: many texts at once, or one sentence with the interface of constituent-treelib.

A backend that is requested by name is never replaced by another one; an error says what is missing. Sentences that a
backend cannot parse are parsed by the built-in chunker.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from constituent_treelib.chunker import Chunker, chunk_sentence, sentence_spans
from constituent_treelib.trees import Tree, TreelibError, draw_png, draw_svg, fold, is_sound

if TYPE_CHECKING:
    import nltk

logger = logging.getLogger(__name__)

NAMES = ("benepar", "chunker", "tree-sitter")


def make_backend(
    name: str,
    model: str | None = None,
    device: str = "cpu",
) -> Backend:
    """Loads a parser.

    Args:
        name: benepar (a neural parser of sentences), chunker (built in, needs nothing), or tree-sitter (programs).
        model: name or path of benepar's model, or tree-sitter's language; None for the backend's default. The chunker
            has no models.
        device: torch device on which benepar computes.

    Raises:
        TreelibError: there is no such backend, or it lacks a library or model; the message says what to do.
    """
    if name == "benepar":
        from constituent_treelib.benepar_backend import DEFAULT_MODEL, BeneparBackend

        return BeneparBackend(DEFAULT_MODEL if model is None else model, device)
    if name == "tree-sitter":
        from constituent_treelib.tree_sitter_backend import TreeSitterBackend

        return TreeSitterBackend("python" if model is None else model)
    if name != "chunker":
        raise TreelibError(f"there is no backend {name!r}; there are {', '.join(NAMES)}.")
    if model is not None:
        raise TreelibError(f"the backend chunker has no models; leave {model!r} out, or use another backend.")
    return Chunker()


class Backend(Protocol):
    """A parser: any object with these four attributes.

    Attributes:
        name: for the logs.
        version: of the program or model.
        unit: input of `parse`: single sentences (natural language) or whole texts (programs). The tree of a text has
            its sentences (statements) as children of the root.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def unit(self) -> Literal["sentence", "text"]: ...

    def parse(
        self,
        units: Sequence[str],
    ) -> Sequence[Tree | None]:
        """One tree per unit, with positions in characters of that unit; None if it cannot be parsed.

        Leaves are in order and do not overlap; there may be gaps between them.
        """
        ...


@dataclass
class ParseCounts:
    """Numbers of sentences (or programs): all, parsed by the backend, and parsed by the chunker, with the reasons."""

    sentences: int = 0
    parsed: int = 0
    fell_back: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def parse_texts(
    texts: Sequence[str],
    backend: Backend,
) -> tuple[list[list[Tree]], ParseCounts]:
    """Parses many texts with one call of the backend. Never raises, whatever a text contains.

    Args:
        texts: any strings.
        backend: the parser.

    Returns:
        For each text its trees in order, one per sentence, with positions in characters of the text; all leaves of a
        text are in order and do not overlap, and a blank text has no tree. And the counts.
    """
    if type(backend) is Chunker:  # nothing to check, and nothing to fall back to
        chunked = [chunk_text(text) for text in texts]
        total = sum(len(sentences) for sentences in chunked)
        return chunked, ParseCounts(sentences=total, parsed=total)

    text_numbers: list[int] = []
    starts: list[int] = []
    units: list[str] = []
    for number, text in enumerate(texts):
        for start, end in _unit_spans(text, backend):
            text_numbers.append(number)
            starts.append(start)
            units.append(text[start:end])

    trees: list[list[Tree]] = [[] for _ in texts]
    reasons: Counter[str] = Counter()
    results = _parse(units, backend)
    for number, start, unit, parsed in zip(
        text_numbers,
        starts,
        units,
        results,
        strict=True,
    ):
        if isinstance(parsed, str):
            reasons[parsed] += 1
            trees[number] += [part.moved(start) for part in chunk_text(unit)]
            continue
        moved = parsed.moved(start)
        if backend.unit == "text" and moved.children:
            trees[number] += moved.children
        else:
            trees[number].append(moved)
    fell_back = reasons.total()
    return trees, ParseCounts(len(units), len(units) - fell_back, fell_back, reasons)


def chunk_text(text: str) -> list[Tree]:
    """The chunker's trees of a text, one per sentence."""
    return [chunk_sentence(text, start, end) for start, end in sentence_spans(text)]


def _unit_spans(
    text: str,
    backend: Backend,
) -> list[tuple[int, int]]:
    """(start, end) of the units of a text that the backend parses."""
    if backend.unit == "sentence":
        return sentence_spans(text)
    return [(0, len(text))] if text.strip() else []


def _parse(
    units: list[str],
    backend: Backend,
) -> list[Tree | str]:
    """For each unit the backend's tree, or the reason why there is none."""
    if not units:
        return []
    try:
        trees = list(backend.parse(list(units)))
    except Exception as error:  # a parser may fail in any way; the run goes on
        logger.warning("%s failed on %d sentences: %s: %s", backend.name, len(units), type(error).__name__, error)
        return [f"failed: {type(error).__name__}"] * len(units)
    if len(trees) != len(units):
        return ["wrong number of trees"] * len(units)
    checked_trees: list[Tree | str] = []
    for unit, tree in zip(units, trees, strict=True):
        checked_trees.append(_check_tree(tree, len(unit)))
    return checked_trees


def _check_tree(tree: object, length: int) -> Tree | str:
    """The tree of a unit of `length` characters if it is sound, else the reason why not."""
    if tree is None:
        return "not parsed"
    try:
        return tree if isinstance(tree, Tree) and is_sound(tree, length) else "unsound tree"
    except Exception:  # positions that are no numbers, children that are no trees
        return "unsound tree"


class ConstituentTree:
    """The constituency tree of a sentence.

    Attributes:
        sentence: without blanks at either end.
        tree: with positions in characters of the sentence.
    """

    def __init__(self, sentence: str, pipeline: Backend | str) -> None:
        """Parses a sentence.

        Args:
            sentence: a sentence; with a backend for programs, a program.
            pipeline: a backend, or the name of one, which is then loaded with its default model.

        Raises:
            TreelibError: the sentence is blank, the backend cannot be loaded or has no tree of the sentence.
        """
        self.sentence = sentence.strip()
        if not self.sentence:
            raise TreelibError("a blank sentence has no tree.")
        backend = make_backend(pipeline) if isinstance(pipeline, str) else pipeline
        tree = backend.parse([self.sentence])[0]
        if tree is None or not is_sound(tree, len(self.sentence)):
            raise TreelibError(
                f"the backend {backend.name} has no tree of {_shortened(self.sentence)!r}; the backend chunker has "
                "one of every sentence."
            )
        self.tree: Tree = tree

    def __str__(self) -> str:
        return self.bracket_string

    def __repr__(self) -> str:
        return f"ConstituentTree({_shortened(self.bracket_string)})"

    @property
    def bracket_string(self) -> str:
        """The tree in Penn brackets, in one line."""
        return self.tree.bracket_string(self.sentence)

    @property
    def leaves(self) -> list[str]:
        """The words."""
        return [self._text(leaf) for leaf in self.tree.leaves()]

    @cached_property
    def nltk_tree(self) -> nltk.Tree:
        """The tree as an ``nltk.Tree``; a part of speech is a node with the word as its child.

        Raises:
            TreelibError: nltk is not installed.
        """
        try:
            from nltk import Tree as NltkTree
        except ImportError as error:
            raise TreelibError(f"nltk_tree needs nltk ({error}): pip install nltk") from error

        def make(
            node: Tree,
            children: list[NltkTree | str],
        ) -> NltkTree | str:
            content = children or [self._text(node)]
            return NltkTree(node.label, content) if children or node.label else content[0]

        root = fold(self.tree, make)
        return root if isinstance(root, NltkTree) else NltkTree("", [root])

    def extract_all_phrases(
        self, min_words_in_phrases: int = 2, avoid_nested_phrases: bool = False
    ) -> dict[str, list[str]]:
        """The text of all phrases by category, from left to right, and outer phrases before inner ones.

        Args:
            min_words_in_phrases: shorter phrases are left out.
            avoid_nested_phrases: leave out phrases inside a phrase of the same category.
        """
        phrases: dict[str, list[str]] = {}
        last_end: dict[str, int] = {}  # of the last phrase of each category
        for node in self.tree.nodes():
            if not node.children or len(node.leaves()) < min_words_in_phrases:
                continue
            if avoid_nested_phrases and node.end <= last_end.get(node.label, 0):
                continue
            last_end[node.label] = max(node.end, last_end.get(node.label, 0))
            phrases.setdefault(node.label, []).append(self._text(node))
        return phrases

    def export_tree(self, destination_filepath: str | Path) -> None:
        """Writes the tree to a file: a picture (.svg or .png) or its brackets (.txt).

        Raises:
            TreelibError: the name of the file ends in something else, or matplotlib, for PNG, is not installed.
        """
        path = Path(destination_filepath)
        if path.suffix.lower() == ".svg":
            path.write_text(draw_svg(self.tree, self.sentence), encoding="utf-8")
        elif path.suffix.lower() == ".png":
            draw_png(self.tree, self.sentence, path)
        elif path.suffix.lower() == ".txt":
            path.write_text(self.bracket_string + "\n", encoding="utf-8", errors="replace")
        else:
            raise TreelibError(f"{path}: a tree is written as .svg, .png or .txt; give the file one of these endings.")

    def _text(self, node: Tree) -> str:
        return self.sentence[node.start : node.end]


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
