# SPDX-License-Identifier: Apache-2.0
"""Programs: tree-sitter's syntax trees, cut into statements, with every visible character in a word.

A simple statement is one node of the grammar. A compound one is taken apart: what stands before its body, the head
("def f(x):"), is a statement of its own, the body's statements follow, and what stands behind the body (another head
such as "else:", a closing brace) comes last. What the parser could not read is cut into its lines. Below statements
stand expressions, as in the grammar. Strings and comments of several words, and what the parser had to skip, have the
trees of the chunker in them.
"""

import importlib
import importlib.metadata
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

from constituent_treelib.chunker import CHUNKED, chunk_sentence, sentence_spans
from constituent_treelib.trees import Tree, TreelibError, fold

# What cannot be written in UTF-8, and NUL, which grammars take for the end of the file.
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
_LANGUAGE = re.compile(r"[a-z][a-z0-9_]*")
ERROR = "ERROR"  # label of what the parser could not read
# Nodes whose children are statements, in the grammars of Python, C, C++, Java, JavaScript, Go, Rust and their like.
_BODIES = frozenset(
    "module program source_file translation_unit block statement_block statement_list compound_statement class_body "
    "declaration_list field_declaration_list enum_body interface_body switch_body body_statement".split()
)


class TreeSitterBackend:
    """Trees of programs in one language."""

    name = "tree-sitter"
    unit: Literal["text"] = "text"

    def __init__(self, language: str = "python") -> None:
        """Loads the grammar.

        Args:
            language: as in the name of the grammar's package: python for tree-sitter-python.

        Raises:
            TreelibError: tree-sitter or the grammar is not installed; the message says how to install it.
        """
        self._parser, self.version = _load(language.lower().replace("-", "_"))

    def parse(self, units: Sequence[str]) -> list[Tree | None]:
        """A tree per program, with its statements as children; None for what is blank or mostly no program."""
        return [self._parse(unit) for unit in units]

    def syntax_tree(self, text: str) -> Tree | None:
        """The tree of the grammar, bodies inside their statements; None for a blank text."""
        text = _UNWRITABLE.sub("\ufffd", text)
        root = self._parser.parse(text.encode("utf-8")).root_node
        character = _characters(text)

        def make(node: Any, children: list[Tree | None]) -> Tree | None:
            # The root begins at the first word, and a program may begin with something that the parser skipped.
            start, end = (0, len(text)) if node is root else (character(node.start_byte), character(node.end_byte))
            return _constituent(text, node.type, start, end, [child for child in children if child is not None])

        return fold(root, make)

    def _parse(self, text: str) -> Tree | None:
        tree = self.syntax_tree(text)
        if tree is None or _is_mostly_error(tree, text):
            return None
        return Tree(tree.label, tree.start, tree.end, tuple(statements(tree, text)))


def _load(language: str) -> tuple[Any, str]:
    """The parser of a language, and what it is."""
    if not _LANGUAGE.fullmatch(language):
        raise TreelibError(
            f"the backend tree-sitter knows no language {language!r}: give the name that its package tree-sitter-… "
            "has, such as python."
        )
    package = f"tree-sitter-{language.replace('_', '-')}"
    try:
        import tree_sitter
    except ImportError as error:
        raise TreelibError(
            f"the backend tree-sitter needs the package tree-sitter ({error}): pip install tree-sitter {package}, or "
            "use the backend chunker."
        ) from error
    try:
        grammar = importlib.import_module(f"tree_sitter_{language}")
        make = getattr(grammar, "language", None) or getattr(grammar, f"language_{language}")
        parser = tree_sitter.Parser(tree_sitter.Language(make()))
        return parser, f"{tree_sitter.__version__}, {package} {importlib.metadata.version(package)}"
    except (ImportError, AttributeError, ValueError) as error:
        raise TreelibError(
            f"the backend tree-sitter has no grammar of the language {language!r} ({error}): pip install {package}, "
            "use another language (default: python), or the backend chunker."
        ) from error


def _characters(text: str) -> Callable[[int], int]:
    """A function from bytes of a text's UTF-8 to its characters."""
    if text.isascii():
        return int
    starts = [0, *accumulate(len(char.encode("utf-8")) for char in text)]
    return lambda offset: bisect_left(starts, offset)


def _constituent(text: str, label: str, start: int, end: int, children: Sequence[Tree]) -> Tree | None:
    """A node over text[start:end], every visible character of which is in a word; None if there is none."""
    parts: list[Tree] = []
    position = start
    for child in children:
        parts += _words(text, position, child.start)
        parts.append(child)
        position = child.end
    parts += _words(text, position, end)
    if not parts:
        return None
    if not children and len(parts) == 1 and not parts[0].children:
        return Tree(label, parts[0].start, parts[0].end)
    return Tree(label, parts[0].start, parts[-1].end, tuple(parts))


def _words(text: str, start: int, end: int) -> list[Tree]:
    """What no node of the grammar covers: one word if there is no blank in it, else the chunker's sentences."""
    piece = text[start:end]
    words = piece.split(None, 1)
    if not words:
        return []
    if len(words) == 1:
        first = text.index(words[0], start)
        return [Tree("", first, first + len(words[0]))]
    return [chunk_sentence(text, start + first, start + last) for first, last in sentence_spans(piece)]


def _is_mostly_error(tree: Tree, text: str) -> bool:
    """Whether more than half of the text stands in no constituent but an error.

    The last of several lines does not count: it may be cut off in the middle of a statement.
    """
    end = text.rstrip().rfind("\n")
    end = len(text) if end < 0 else end
    kept = sum(leaf.end - leaf.start for leaf in tree.leaves() if leaf.start < end)
    errors = [node for node in tree.nodes() if node.label == ERROR]
    parts = [part for error in errors for part in error.children or (error,) if part.start < end]
    # What the grammar recognised inside an error is none; single words, and what the chunker made, are.
    unread = [part for part in parts if not part.children or part.label == CHUNKED]
    return 2 * sum(part.end - part.start for part in unread) > kept


def statements(program: Tree, text: str) -> list[Tree]:
    """The statements of a program, with the heads of compound ones, from left to right."""
    apart = _taken_apart(program, text)
    found: list[Tree] = []
    waiting = [program]
    while waiting:
        node = waiting.pop()
        if id(node) in apart:
            is_body = node.label in _BODIES or (node is program and node.label != ERROR)
            waiting.extend(reversed(node.children if is_body else _pieces(node, apart, text)))
        elif found and _is_mark(node):  # a closing brace, a semicolon: belongs to the statement before
            before = found.pop()
            found.append(Tree(before.label, before.start, node.end, (before, node)))
        else:
            found.append(node)
    return found


def _taken_apart(program: Tree, text: str) -> set[int]:
    """ids of the nodes that are no single statement.

    The program, bodies, errors of several lines in them (and in such errors), and all that holds one of these.
    """
    nodes = program.nodes()
    apart = {id(program)}
    for node in nodes:  # each before its children, so that errors in errors are found
        if id(node) in apart or node.label in _BODIES:
            errors = [child for child in node.children if child.label == ERROR and child.children]
            apart.update(id(error) for error in errors if "\n" in text[error.start : error.end])
    for node in reversed(nodes):  # each after its children
        if node.children and (node.label in _BODIES or any(id(child) in apart for child in node.children)):
            apart.add(id(node))
    return apart


def _pieces(node: Tree, apart: set[int], text: str) -> list[Tree]:
    """The children that are taken apart further, and runs of the others between them; a line of an error is a run."""
    runs: list[list[Tree]] = []
    for child in node.children:
        last = runs[-1][-1] if runs else None
        if last is None or id(child) in apart or id(last) in apart:
            runs.append([child])
        elif node.label == ERROR and "\n" in text[last.end : child.start]:
            runs.append([child])
        else:
            runs[-1].append(child)
    return [run[0] if id(run[0]) in apart else Tree(node.label, run[0].start, run[-1].end, tuple(run)) for run in runs]


def _is_mark(node: Tree) -> bool:
    """Whether a statement is nothing but marks. A node of the grammar without a name is labelled by what it says."""
    return all(leaf.label and not any(char.isalnum() for char in leaf.label) for leaf in node.leaves())
