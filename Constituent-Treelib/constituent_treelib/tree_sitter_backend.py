# SPDX-License-Identifier: Apache-2.0
"""Programs: tree-sitter's syntax trees, cut into statements, with every visible character in a word.

A simple statement is one node of the grammar. A compound statement is split: its head ("def f(x):") is a statement,
followed by the statements of its body and by what comes after the body (another head such as "else:", a closing
brace). Text that the parser could not read is cut into lines. Below statements are expressions, as in the grammar.
Strings and comments of several words, and text that the parser skipped, contain the chunker's trees.
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

# Characters that UTF-8 cannot encode, and NUL, which grammars take for the end of the file.
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")
_LANGUAGE = re.compile(r"[a-z][a-z0-9_]*")
ERROR = "ERROR"  # label of text that the parser could not read
# Nodes whose children are statements, in the grammars of Python, C, C++, Java, JavaScript, Go, Rust and similar ones.
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
        """A tree per program, with its statements as children; None for a blank text or one that is no program."""
        return [self._parse(unit) for unit in units]

    def syntax_tree(self, text: str) -> Tree | None:
        """The tree of the grammar, with bodies inside their statements; None for a blank text."""
        text = _UNWRITABLE.sub("\ufffd", text)
        root = self._parser.parse(text.encode("utf-8")).root_node
        character = _characters(text)

        def make(node: Any, children: list[Tree | None]) -> Tree | None:
            parts = [child for child in children if child is not None]
            if node is root:  # tree-sitter's root begins after text that the parser skipped
                return _constituent(text, node.type, 0, len(text), parts)
            start = character(node.start_byte)
            end = character(node.end_byte)
            return _constituent(text, node.type, start, end, parts)

        return fold(root, make)

    def _parse(self, text: str) -> Tree | None:
        tree = self.syntax_tree(text)
        if tree is None or _is_mostly_error(tree, text):
            return None
        children = tuple(statements(tree, text))
        return Tree(tree.label, tree.start, tree.end, children)


def _load(language: str) -> tuple[Any, str]:
    """The parser of a language, and its version."""
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
        make_language = getattr(grammar, "language", None) or getattr(grammar, f"language_{language}")
        parser = tree_sitter.Parser(tree_sitter.Language(make_language()))
        version = f"{tree_sitter.__version__}, {package} {importlib.metadata.version(package)}"
    except (ImportError, AttributeError, ValueError) as error:
        raise TreelibError(
            f"the backend tree-sitter has no grammar of the language {language!r} ({error}): pip install {package}, "
            "use another language (default: python), or the backend chunker."
        ) from error
    return parser, version


def _characters(text: str) -> Callable[[int], int]:
    """A function from byte offsets in a text's UTF-8 to character positions."""
    if text.isascii():
        return int
    starts = [0, *accumulate(len(char.encode("utf-8")) for char in text)]
    return lambda offset: bisect_left(starts, offset)


def _constituent(text: str, label: str, start: int, end: int, children: Sequence[Tree]) -> Tree | None:
    """A node for text[start:end] with every visible character in a word; None if there is no visible character."""
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
    """Words for text that no node covers: one if there is no blank in it, else the chunker's sentences."""
    gap = text[start:end]
    words = gap.split(None, 1)
    if not words:
        return []
    if len(words) == 1:
        first = text.index(words[0], start)
        return [Tree("", first, first + len(words[0]))]
    return [chunk_sentence(text, start + first, start + last) for first, last in sentence_spans(gap)]


def _is_mostly_error(tree: Tree, text: str) -> bool:
    """Whether more than half of the text is in no constituent but an error.

    The last of several lines does not count, since it may be cut off in the middle of a statement.
    """
    end = text.rstrip().rfind("\n")
    if end < 0:
        end = len(text)
    text_size = 0
    for leaf in tree.leaves():
        if leaf.start < end:
            text_size += leaf.end - leaf.start

    # A node of the grammar inside an error counts as read; single words and the chunker's trees do not.
    unread_size = 0
    for error in tree.nodes():
        if error.label != ERROR:
            continue
        for part in error.children or (error,):
            if part.start < end and (not part.children or part.label == CHUNKED):
                unread_size += part.end - part.start
    return 2 * unread_size > text_size


def statements(program: Tree, text: str) -> list[Tree]:
    """The statements of a program, with the heads of compound ones, from left to right."""
    split_ids = _nodes_to_split(program, text)
    result: list[Tree] = []
    waiting = [program]
    while waiting:
        node = waiting.pop()
        if id(node) in split_ids:
            is_body = node.label in _BODIES or (node is program and node.label != ERROR)
            parts = list(node.children) if is_body else _merge_runs(node, split_ids, text)
            waiting.extend(reversed(parts))
        elif result and _is_punctuation(node):  # a closing brace, a semicolon: belongs to the statement before
            before = result.pop()
            result.append(Tree(before.label, before.start, node.end, (before, node)))
        else:
            result.append(node)
    return result


def _nodes_to_split(program: Tree, text: str) -> set[int]:
    """ids of the nodes that are more than one statement.

    These are the program, bodies, errors of several lines in them (and in such errors), and all ancestors of these.
    """
    nodes = program.nodes()
    split_ids = {id(program)}
    for node in nodes:  # parents first, so that errors inside errors are reached
        if id(node) not in split_ids and node.label not in _BODIES:
            continue
        for child in node.children:
            if child.label == ERROR and child.children and "\n" in text[child.start : child.end]:
                split_ids.add(id(child))
    for node in reversed(nodes):  # children first
        holds_split_node = any(id(child) in split_ids for child in node.children)
        if holds_split_node or (node.children and node.label in _BODIES):
            split_ids.add(id(node))
    return split_ids


def _merge_runs(node: Tree, split_ids: set[int], text: str) -> list[Tree]:
    """The children that are split further, and the others merged into runs; each line of an error is a run."""
    runs: list[list[Tree]] = []
    for child in node.children:
        last = runs[-1][-1] if runs else None
        if last is None or id(child) in split_ids or id(last) in split_ids:
            runs.append([child])
        elif node.label == ERROR and "\n" in text[last.end : child.start]:
            runs.append([child])
        else:
            runs[-1].append(child)

    parts = []
    for run in runs:
        if id(run[0]) in split_ids:
            parts.append(run[0])
        else:
            parts.append(Tree(node.label, run[0].start, run[-1].end, tuple(run)))
    return parts


def _is_punctuation(node: Tree) -> bool:
    """Whether a statement consists of punctuation alone. The label of an unnamed node of the grammar is its text."""
    for leaf in node.leaves():
        if not leaf.label or any(char.isalnum() for char in leaf.label):
            return False
    return True
