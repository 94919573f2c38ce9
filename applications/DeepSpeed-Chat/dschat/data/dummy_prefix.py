# SPDX-License-Identifier: Apache-2.0
"""Fast tokenizers without their dummy prefix: the space that some put before every text."""

from __future__ import annotations

import json
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Parts of a tokenizer's backend → key of the list in a part of type Sequence.
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
# Tokenizer → (its length then, its backend without dummy prefix; None if it has no such prefix).
_BARE: weakref.WeakKeyDictionary[Any, tuple[int, Tokenizer | None]] = weakref.WeakKeyDictionary()


def backend_without_prefix(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Copy of a fast tokenizer's backend without dummy prefix, made once; None if there is no such prefix."""
    size, bare = _BARE.get(tokenizer, (None, None))
    if size != len(tokenizer):
        bare = _make_bare(tokenizer.backend_tokenizer)
        _BARE[tokenizer] = (len(tokenizer), bare)
    return bare


def _make_bare(backend: Tokenizer) -> Tokenizer | None:
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    edited = {}
    for part, key in PARTS.items():
        edited[part] = _without_prefix(state.get(part), key)
    if all(edited[part] == state.get(part) for part in PARTS):
        return None
    bare = Tokenizer.from_str(json.dumps(state | edited | {"truncation": None, "padding": None}))
    bare.encode_special_tokens = backend.encode_special_tokens
    return bare


def _without_prefix(node: dict[str, Any] | None, sequence_key: str) -> dict[str, Any] | None:
    """One part of a backend's JSON without the steps that add a prefix or, in a decoder, remove it."""
    if node is None:
        return None
    kind = node["type"]
    if kind == "Sequence":
        steps = []
        for step in node[sequence_key]:
            edited = _without_prefix(step, sequence_key)
            if edited is not None:
                steps.append(edited)
        return node | {sequence_key: steps} if steps else None
    if kind == "Metaspace":
        return node | {"prepend_scheme": "never"}
    if kind == "ByteLevel" and sequence_key == PARTS["pre_tokenizer"]:
        return node | {"add_prefix_space": False}
    if kind == "Prepend":
        return None
    if kind == "Strip" and sequence_key == PARTS["decoder"] and node["content"] == " ":
        return None
    return node
