# SPDX-License-Identifier: Apache-2.0
"""Backends by name. Whoever asks for one gets it, or a message that says what is missing; never another one."""

from constituent_treelib.chunker import Chunker
from constituent_treelib.errors import TreelibError
from constituent_treelib.parsing import Backend

NAMES = ("benepar", "link-grammar", "chunker", "tree-sitter")


def make_backend(name: str, model: str | None = None, device: str = "cpu", timeout: float = 1.0) -> Backend:
    """A parser, loaded and ready.

    Args:
        name: benepar (a neural parser, for sentences), link-grammar (a grammar of English), chunker (built in, needs
            nothing), or tree-sitter (programs).
        model: of benepar the name or path of a model, of link-grammar and tree-sitter a language; the backend's own
            default if None. The chunker has none.
        device: of torch, where benepar computes.
        timeout: seconds that link-grammar may take for a sentence.

    Raises:
        TreelibError: there is no such backend, or it lacks a library or model; the message says what to do.
    """
    given = {} if model is None else {"model": model}
    if name == "benepar":
        from constituent_treelib.benepar_backend import BeneparBackend

        return BeneparBackend(**given, device=device)
    if name == "link-grammar":
        from constituent_treelib.link_grammar import LinkGrammarBackend

        return LinkGrammarBackend("en" if model is None else model, timeout)
    if name == "tree-sitter":
        from constituent_treelib.tree_sitter_backend import TreeSitterBackend

        return TreeSitterBackend("python" if model is None else model)
    if name != "chunker":
        raise TreelibError(f"there is no backend {name!r}; there are {', '.join(NAMES)}.")
    if model is not None:
        raise TreelibError(f"the backend chunker has no models; leave {model!r} out, or use another backend.")
    return Chunker()
