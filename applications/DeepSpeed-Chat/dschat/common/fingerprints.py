# SPDX-License-Identifier: Apache-2.0
"""What two things must share to be called the same: hashes of files, and of what decides a tokenizer's ids."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Settings of a tokenizer that say where it lies, not what it does.
PLACES = ("name_or_path", "vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "special_tokens_map_file")


def file_hash(file: str | Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for two tokenizers that give the same ids to every text, before and after they were used.

    A pad token at the end of the vocabulary does not count: step 1 adds one to a tokenizer that has none.
    """
    vocabulary = tokenizer.get_vocab()
    is_last = tokenizer.pad_token_id is not None and tokenizer.pad_token_id == max(vocabulary.values())
    pad = tokenizer.pad_token if is_last and tokenizer.pad_token_id != tokenizer.eos_token_id else None
    whole = {
        "vocabulary": {token: number for token, number in vocabulary.items() if token != pad},
        "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "rules": _rules(tokenizer, pad) if tokenizer.is_fast else _slow_rules(tokenizer),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()


def _rules(tokenizer: PreTrainedTokenizerBase, pad: str | None) -> object:
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    state["added_tokens"] = [token for token in state.get("added_tokens") or [] if token["content"] != pad]
    vocabulary = state["model"].get("vocab")
    if isinstance(vocabulary, dict):  # it is compared above; here it may hold the pad token
        state["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token != pad}
    return state


def _slow_rules(tokenizer: PreTrainedTokenizerBase) -> object:
    """The settings of a slow tokenizer and the hashes of the files that it would save."""
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if name not in PLACES and "pad" not in name and isinstance(value, str | int | float | bool)
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = tokenizer.save_vocabulary(folder)
        except NotImplementedError:
            files = ()
        return [type(tokenizer).__qualname__, settings, [file_hash(file) for file in files]]
