# SPDX-License-Identifier: Apache-2.0
"""Constituency trees with character positions, from several parsers.

    from constituent_treelib import make_backend, parse_texts

    trees, counts = parse_texts(["The quick fox jumped. It was fast."], make_backend("chunker"))

What needs more than Python's standard library is imported when it is used.
"""

from constituent_treelib.parsing import Backend, ConstituentTree, ParseCounts, make_backend, parse_texts
from constituent_treelib.trees import Tree, TreelibError

__all__ = ["Backend", "ConstituentTree", "ParseCounts", "Tree", "TreelibError", "make_backend", "parse_texts"]
