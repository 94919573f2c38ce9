# SPDX-License-Identifier: Apache-2.0
"""Hashes that tell whether two files, tokenizers, chat templates or models are the same."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat.base.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Files of a model, its tokenizer and its templates; results may lie beside them.
MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".txt", ".model", ".jinja")
# Cache of fingerprints, since hashing a large vocabulary takes seconds: tokenizer → its length and special ids at that
# time, and the fingerprint.
_FINGERPRINTS: weakref.WeakKeyDictionary[Any, tuple[list[int | None], str]] = weakref.WeakKeyDictionary()


def content_hash(content: str | bytes) -> str:
    """SHA-256 of bytes, or of text in UTF-8 with a ? for each lone surrogate."""
    return contents_hash([content])


def contents_hash(contents: Iterable[str | bytes]) -> str:
    """SHA-256 of the concatenation of several contents, see `content_hash`; they need not be in memory together.

    ``["ab"]`` and ``["a", "b"]`` have the same hash.
    """
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content.encode("utf-8", "replace") if isinstance(content, str) else content)
    return digest.hexdigest()


def file_hash(file: str | Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything in a tokenizer that decides which ids it gives a text.

    Padding and truncation, which calls change, are not part of it. Neither is a pad token with the last id of the
    vocabulary: step 1 adds one to a tokenizer that has none.

    The hash is computed again if the tokenizer's length or special ids have changed. Other rules, such as its
    post-processor, must not be changed after the first call.
    """
    state = [len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    cached = _FINGERPRINTS.get(tokenizer)
    if cached is not None and cached[0] == state:
        return cached[1]
    vocabulary = tokenizer.get_vocab()
    pad = _added_pad_token(tokenizer, vocabulary)
    content = {
        "vocabulary": {token: number for token, number in vocabulary.items() if token != pad},
        "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "rules": _rules(tokenizer, pad),
    }
    fingerprint = content_hash(json.dumps(content, sort_keys=True, default=str))
    _FINGERPRINTS[tokenizer] = (state, fingerprint)
    return fingerprint


def _added_pad_token(tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, int]) -> str | None:
    """The pad token if it has the last id of the vocabulary and is not EOS."""
    pad_id = tokenizer.pad_token_id
    if pad_id is None or pad_id == tokenizer.eos_token_id or pad_id != max(vocabulary.values()):
        return None
    return str(tokenizer.pad_token)


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a tokenizer's chat template and of the special tokens that the template names.

    Other special tokens, such as a pad token that step 1 adds, are not part of it.
    """
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    special = {}
    for name, token in tokenizer.special_tokens_map.items():
        if name in template:
            special[name] = str(token)
    return content_hash(json.dumps([template, special], sort_keys=True))


def _rules(tokenizer: PreTrainedTokenizerBase, pad: str | None) -> object:
    """The state of a tokenizer without padding, truncation and the token `pad`."""
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    added_tokens = []
    for token in state.get("added_tokens") or []:
        if token["content"] != pad:
            added_tokens.append(token)
    state["added_tokens"] = added_tokens
    vocabulary = state["model"].get("vocab")
    if isinstance(vocabulary, dict):  # the list of a Unigram model does not hold tokens that were added to it
        state["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token != pad}
    return state


def model_hash(path: str) -> str:
    """Hash of a model's folder (its config and samples of its weights), or the commit of a model on the hub.

    A folder without a model may hold an adapter, itself or in ``adapter``. The adapter is hashed together with its
    base, if the base is a folder.

    Raises:
        UserError: a weight file is damaged.
    """
    folder = Path(path)
    if not folder.is_dir():
        return hub_commit(path) or path  # a model whose commit is not known is told apart by its name
    return _folder_hash(folder, ())


def hub_commit(path: str, local_files_only: bool = False) -> str | None:
    """The commit of a model on the hub, or of the copy in the hub's cache; None if it is not known.

    Raises:
        OSError: there is no such model.
    """
    from transformers.utils.hub import cached_file, extract_commit_hash

    config = cached_file(path, "config.json", local_files_only=local_files_only)
    commit: str | None = extract_commit_hash(config, None)
    return commit


def _folder_hash(folder: Path, hashed: tuple[Path, ...]) -> str:
    """Hash of the model or adapter in a folder; `hashed` are the folders of the adapters that it is the base of.

    An adapter's base counts by its own hash and not by its path, so that a model that has moved keeps its hash.
    """
    config = _find_config(folder)
    config_bytes = config.read_bytes()
    hashed += (folder.resolve(),)
    if config != folder / "config.json":
        settings = json.loads(config_bytes)
        base = _base_folder(settings)
        if base is not None and base.resolve() not in hashed:  # adapters may name each other
            settings["base_model_name_or_path"] = _folder_hash(base, hashed)
            config_bytes = json.dumps(settings, sort_keys=True).encode()
    digest = hashlib.sha256(config_bytes)
    for file in sorted(config.parent.glob("*.safetensors")):
        for sample in _weight_samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _find_config(folder: Path) -> Path:
    """The config of the model in a folder or, if there is none, of the adapter.

    Some programs write the base model's config.json beside an adapter's weights.
    """
    model_config = folder / "config.json"
    adapter_config = folder / "adapter_config.json"
    weights = [file.name for file in folder.glob("*.safetensors")]
    if adapter_config.is_file() and weights == ["adapter_model.safetensors"]:
        return adapter_config
    for config in (model_config, adapter_config, folder / "adapter" / "adapter_config.json"):
        if config.is_file():
            return config
    return model_config


def _base_folder(settings: Mapping[str, object]) -> Path | None:
    """The folder of the base that an adapter's config names; None if the base is not a folder."""
    base = settings.get("base_model_name_or_path")
    return Path(base) if isinstance(base, str) and Path(base).is_dir() else None


def _weight_samples(file: Path) -> Iterator[bytes]:
    """Name, dtype and shape of every weight in a safetensors file, and its first and last row.

    Raises:
        UserError: the file is damaged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as weights:
            for name in sorted(weights.keys()):
                rows = weights.get_slice(name)
                shape = rows.get_shape()
                yield f"{file.name} {name} {rows.get_dtype()} {shape}".encode()
                count = shape[0] if shape else 0
                ends = [rows[:1], rows[count - 1 :]] if count else [weights.get_tensor(name)]
                for end in ends:
                    yield end.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}): copy the model again.") from error


def folder_stamp(path: str) -> str:
    """The path of a model and, for a folder, 12 hexadecimal digits that change when its files are written again.

    For commands that resume only if the files are unchanged. Reads file sizes and times, not contents. A model on the
    hub has its commit instead.
    """
    folder = Path(path)
    if not folder.is_dir():
        with suppress(OSError):
            return f"{path} (commit {hub_commit(path)})"
        return path
    stats = []
    for file in (*folder.iterdir(), *folder.glob("adapter/*")):
        if file.suffix in MODEL_SUFFIXES:
            stat = file.stat()
            stats.append((str(file.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return f"{os.path.abspath(path)} (files {content_hash(repr(sorted(stats)))[:12]})"
