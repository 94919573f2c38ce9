# SPDX-License-Identifier: Apache-2.0
"""One sentence and its tree, with the names that users of the package constituent-treelib know."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from constituent_treelib.backends import make_backend
from constituent_treelib.draw import draw_png, draw_svg
from constituent_treelib.errors import TreelibError
from constituent_treelib.parsing import Backend
from constituent_treelib.trees import Tree, fold, is_sound

if TYPE_CHECKING:
    import nltk


class ConstituentTree:
    """The constituency tree of a sentence.

    Attributes:
        sentence: without blanks at either end.
        tree: with positions in characters of the sentence.
    """

    def __init__(self, sentence: str, pipeline: Backend | str) -> None:
        """Parses.

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
        """The tree as one of nltk's; a part of speech is a node with the word as its child.

        Raises:
            TreelibError: nltk is not installed.
        """
        try:
            from nltk import Tree as NltkTree
        except ImportError as error:
            raise TreelibError(f"nltk_tree needs nltk ({error}): pip install nltk") from error

        def make(node: Tree, children: list[NltkTree | str]) -> NltkTree | str:
            content = children or [self._text(node)]
            return NltkTree(node.label, content) if children or node.label else content[0]

        made = fold(self.tree, make)
        return made if isinstance(made, NltkTree) else NltkTree("", [made])

    def extract_all_phrases(
        self, min_words_in_phrases: int = 2, avoid_nested_phrases: bool = False
    ) -> dict[str, list[str]]:
        """The phrases by category, as they stand in the sentence, from left to right and outer before inner ones.

        Args:
            min_words_in_phrases: shorter phrases are left out.
            avoid_nested_phrases: leave out what lies in a phrase of the same category.
        """
        found: dict[str, list[str]] = {}
        reached: dict[str, int] = {}  # per category the end of its last phrase
        for node in self.tree.nodes():
            if not node.children or len(node.leaves()) < min_words_in_phrases:
                continue
            if avoid_nested_phrases and node.end <= reached.get(node.label, 0):
                continue
            reached[node.label] = max(node.end, reached.get(node.label, 0))
            found.setdefault(node.label, []).append(self._text(node))
        return found

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
