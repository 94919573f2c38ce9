# SPDX-License-Identifier: Apache-2.0
"""Constituency trees with character positions, from several parsers.

    from constituent_treelib import make_backend, parse_texts

    trees, counts = parse_texts(["The quick fox jumped. It was fast."], make_backend("chunker"))

What needs more than Python's standard library is imported when it is used.
"""

from constituent_treelib.backends import make_backend
from constituent_treelib.constituent_tree import ConstituentTree
from constituent_treelib.errors import TreelibError
from constituent_treelib.parsing import Backend, ParseCounts, parse_texts
from constituent_treelib.trees import Tree

__all__ = ["Backend", "ConstituentTree", "ParseCounts", "Tree", "TreelibError", "make_backend", "parse_texts"]
