# SPDX-License-Identifier: Apache-2.0
"""Parses texts with a backend: `parse_texts` for many, `ConstituentTree` for one sentence.

The interface of `ConstituentTree` is that of the package constituent-treelib.

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
_have_failed: set[str] = set()  # names of backends that have raised: the first time is a warning, later ones are not

NAMES = ("benepar", "chunker", "tree-sitter")


def make_backend(name: str, model: str | None = None, device: str = "cpu") -> Backend:
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
    if name == "chunker":
        if model is not None:
            raise TreelibError(f"the backend chunker has no models; leave {model!r} out, or use another backend.")
        return Chunker()
    raise TreelibError(f"there is no backend {name!r}; there are {', '.join(NAMES)}.")


class Backend(Protocol):
    """A parser: any object with these three attributes and the method `parse`.

    Attributes:
        name: for the logs.
        version: of the program or model.
        unit: what `parse` reads: single sentences (natural language), or whole texts (programs). The tree of a whole
            text is cut into the children of its root, which are the statements of a program.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def unit(self) -> Literal["sentence", "text"]: ...

    def parse(self, units: Sequence[str]) -> Sequence[Tree | None]:
        """One tree per unit, with positions in characters of that unit; None if it cannot be parsed.

        Leaves are in order and do not overlap; there may be gaps between them.
        """
        ...


@dataclass(frozen=True)
class _Unit:
    """A sentence or program that the backend parses; its place is the index of a text and the first character."""

    text_index: int
    start: int
    text: str


@dataclass
class ParseCounts:
    """How many sentences (or programs) were parsed, and how.

    Attributes:
        sentences: all of them.
        parsed: those that the backend parsed.
        fell_back: those that the chunker parsed instead. With the chunker as the backend there are none.
        reasons: why, with the number of sentences for each reason.
    """

    sentences: int = 0
    parsed: int = 0
    fell_back: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def parse_texts(texts: Sequence[str], backend: Backend) -> tuple[list[list[Tree]], ParseCounts]:
    """Parses many texts with one call of the backend. Never raises, whatever a text contains; a failure is logged.

    Args:
        texts: any strings.
        backend: the parser.

    Returns:
        For each text its trees in order, one per sentence, with positions in characters of the text; all leaves of a
        text are in order and do not overlap, and a blank text has no tree. And the counts.
    """
    if type(backend) is Chunker:  # its trees are sound; those of a subclass might not be
        chunked = [chunk_text(text) for text in texts]
        total = sum(len(sentences) for sentences in chunked)
        return chunked, ParseCounts(sentences=total, parsed=total)

    units: list[_Unit] = []
    for text_index, text in enumerate(texts):
        for start, end in _unit_spans(text, backend):
            units.append(_Unit(text_index, start, text[start:end]))

    trees: list[list[Tree]] = [[] for _ in texts]
    reasons: Counter[str] = Counter()
    results = _parse([unit.text for unit in units], backend)
    for unit, result in zip(units, results, strict=True):
        if isinstance(result, str):
            reasons[result] += 1
            trees[unit.text_index] += [part.moved(unit.start) for part in chunk_text(unit.text)]
            continue
        tree = result.moved(unit.start)
        if backend.unit == "text" and tree.children:
            trees[unit.text_index] += tree.children
        else:
            trees[unit.text_index].append(tree)
    fell_back = reasons.total()
    return trees, ParseCounts(len(units), len(units) - fell_back, fell_back, reasons)


def chunk_text(text: str) -> list[Tree]:
    """The chunker's trees of a text, one per sentence."""
    return [chunk_sentence(text, start, end) for start, end in sentence_spans(text)]


def _unit_spans(text: str, backend: Backend) -> list[tuple[int, int]]:
    """(start, end) of the units of a text that the backend parses."""
    if backend.unit == "sentence":
        return sentence_spans(text)
    return [(0, len(text))] if text.strip() else []


def _parse(units: list[str], backend: Backend) -> list[Tree | str]:
    """For each unit the backend's tree, or the reason why there is none."""
    errors: list[Exception] = []
    results = _parse_or_halve(units, backend, errors)
    if errors:
        level = logging.INFO if backend.name in _have_failed else logging.WARNING
        _have_failed.add(backend.name)
        count = f"{len(errors)} of {len(units)} {backend.unit}s"
        kind = type(errors[0]).__name__
        logger.log(level, "%s failed on %s, first with %s: %s", backend.name, count, kind, errors[0])
    return results


def _parse_or_halve(units: list[str], backend: Backend, errors: list[Exception]) -> list[Tree | str]:
    """What `_parse` returns; the units that make the backend raise are located by halving, and their errors added."""
    if not units:
        return []
    try:
        trees = list(backend.parse(list(units)))
    except Exception as error:  # a parser may fail in any way; the run goes on
        if len(units) == 1:
            errors.append(error)
            return [f"failed: {type(error).__name__}"]
        middle = len(units) // 2
        first_half = _parse_or_halve(units[:middle], backend, errors)
        return first_half + _parse_or_halve(units[middle:], backend, errors)
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
        sentence: the sentence without blanks at either end. A program keeps the indentation of its first line.
        tree: its tree, with positions in characters of the sentence.
    """

    def __init__(self, sentence: str, pipeline: Backend | str) -> None:
        """Parses a sentence.

        Args:
            sentence: a sentence; with a backend for programs, a program.
            pipeline: a backend, or the name of one, which is then loaded with its default model.

        Raises:
            TreelibError: the sentence is blank, the backend cannot be loaded or has no tree of the sentence.
        """
        if not sentence.strip():
            raise TreelibError("a blank sentence has no tree.")
        backend = make_backend(pipeline) if isinstance(pipeline, str) else pipeline
        self.sentence = sentence.strip() if backend.unit == "sentence" else sentence.strip("\n").rstrip()
        (tree,) = _parse([self.sentence], backend)
        if isinstance(tree, str):
            raise TreelibError(
                f"the backend {backend.name} has no tree of {_shortened(self.sentence)!r}; the backend "
                "chunker has one of every sentence."
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

        def make(node: Tree, children: list[NltkTree | str]) -> NltkTree | str:
            if children:
                return NltkTree(node.label, children)
            word = self._text(node)
            return NltkTree(node.label, [word]) if node.label else word

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
        last_end: dict[str, int] = {}  # end of the last phrase of each category that was not left out
        for node in self.tree.nodes():  # parents come first: a node that ends before the last phrase is inside it
            if not node.children or len(node.leaves()) < min_words_in_phrases:
                continue
            if avoid_nested_phrases and node.end <= last_end.get(node.label, 0):
                continue
            last_end[node.label] = node.end
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
