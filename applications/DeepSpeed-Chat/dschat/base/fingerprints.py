# SPDX-License-Identifier: Apache-2.0
"""Hashes that tell whether two files, tokenizers, chat templates or models are the same."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Settings of a tokenizer that name its files instead of changing what it does.
FILE_SETTINGS = (
    "name_or_path",
    "vocab_file",
    "merges_file",
    "tokenizer_file",
    "tokenizer_object",
    "special_tokens_map_file",
)
SAMPLE = 1 << 20  # bytes at either end of a weight file that go into a model's hash
INNER_SAMPLE = 1 << 12  # bytes at the beginning of every weight of a file that is larger than both ends

# Tokenizer → its length and special ids when it was hashed, and the hash: it takes seconds for large vocabularies.
_HASHED: weakref.WeakKeyDictionary[Any, tuple[list[int | None], str]] = weakref.WeakKeyDictionary()


def content_hash(content: str | bytes) -> str:
    """SHA-256 of bytes, or of text in UTF-8 with a ? for each lone surrogate."""
    return contents_hash([content])


def contents_hash(contents: Iterable[str | bytes]) -> str:
    """SHA-256 of several contents one after another, see `content_hash`; they need not be in memory together."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content.encode("utf-8", "replace") if isinstance(content, str) else content)
    return digest.hexdigest()


def file_hash(file: str | Path) -> str:
    """SHA-256 of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash that is equal for tokenizers that give equal ids to every text; using a tokenizer does not change it.

    A pad token at the end of the vocabulary does not count: step 1 adds one to a tokenizer that has none.
    """
    state = [len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    hashed_state, hashed = _HASHED.get(tokenizer, (None, ""))
    if hashed_state == state:
        return hashed
    vocabulary = tokenizer.get_vocab()
    pad = _added_pad_token(tokenizer, vocabulary)
    content = {
        "vocabulary": {token: number for token, number in vocabulary.items() if token != pad},
        "ends": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "rules": _fast_rules(tokenizer, pad) if tokenizer.is_fast else _slow_rules(tokenizer),
    }
    fingerprint = content_hash(json.dumps(content, sort_keys=True, default=str))
    _HASHED[tokenizer] = (state, fingerprint)
    return fingerprint


def _added_pad_token(tokenizer: PreTrainedTokenizerBase, vocabulary: dict[str, int]) -> str | None:
    """The pad token if it has the last id of the vocabulary and is not EOS."""
    pad_id = tokenizer.pad_token_id
    if pad_id is None or pad_id == tokenizer.eos_token_id or pad_id != max(vocabulary.values()):
        return None
    return str(tokenizer.pad_token)


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash that is equal for tokenizers whose chat templates write equal texts.

    It covers the template and the special tokens that the template names; a pad token that step 1 adds, for instance,
    does not count.
    """
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    special = {}
    for name, token in tokenizer.special_tokens_map.items():
        if name in template:
            special[name] = str(token)
    return content_hash(json.dumps([template, special], sort_keys=True))


def _fast_rules(tokenizer: PreTrainedTokenizerBase, pad: str | None) -> object:
    state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    state["added_tokens"] = [token for token in state.get("added_tokens") or [] if token["content"] != pad]
    vocabulary = state["model"].get("vocab")
    if isinstance(vocabulary, dict):  # it is compared above; here it may hold the pad token
        state["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token != pad}
    return state


def _slow_rules(tokenizer: PreTrainedTokenizerBase) -> object:
    """The settings of a slow tokenizer and the hashes of the files that it would save."""
    settings = {}
    for name, value in tokenizer.init_kwargs.items():
        if name not in FILE_SETTINGS and "pad" not in name and isinstance(value, str | int | float | bool):
            settings[name] = value
    with tempfile.TemporaryDirectory() as folder:
        try:
            files = tokenizer.save_vocabulary(folder)
        except NotImplementedError:
            files = ()
        return [type(tokenizer).__qualname__, settings, [file_hash(file) for file in files]]


def model_hash(path: str) -> str:
    """Hash of a model: of a folder its config and samples of its weight files; of a model on the hub the commit.

    A weight file counts with its length, both of its ends and, if it is larger than these, the beginning of every
    weight. A folder without a model may hold an adapter, itself or in ``adapter``; then the adapter's base counts,
    too, if that is a folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        from transformers import AutoConfig

        return str(getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "_commit_hash", None))
    model_config = folder / "config.json"
    adapter_configs = [folder / "adapter_config.json", folder / "adapter" / "adapter_config.json"]
    config = next((file for file in (model_config, *adapter_configs) if file.is_file()), model_config)
    content = config.read_bytes()
    digest = hashlib.sha256(content)
    if config != model_config:
        base = json.loads(content).get("base_model_name_or_path")
        if isinstance(base, str) and Path(base).is_dir() and Path(base).resolve() != folder.resolve():
            digest.update(model_hash(base).encode())
    for file in sorted(config.parent.glob("*.safetensors")):
        for sample in _weight_samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _weight_samples(file: Path) -> Iterator[bytes]:
    """Name, length and both ends of a safetensors file and, if it is larger, the beginning of every weight."""
    size = file.stat().st_size
    yield f"{file.name} {size}".encode()
    with open(file, "rb") as stream:
        yield stream.read(SAMPLE)
        stream.seek(max(0, size - SAMPLE))
        yield stream.read(SAMPLE)
        if size > 2 * SAMPLE:
            for start, end in _weight_offsets(stream):
                stream.seek(start)
                yield stream.read(min(INNER_SAMPLE, end - start))


def _weight_offsets(stream: BinaryIO) -> list[tuple[int, int]]:
    """First byte of every weight in a safetensors file, and the one behind its last, from the file's header."""
    stream.seek(0)
    header_length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(header_length))
    header.pop("__metadata__", None)
    data_start = 8 + header_length
    offsets = []
    for weight in header.values():
        start, end = weight["data_offsets"]
        offsets.append((data_start + start, data_start + end))
    return sorted(offsets)


def folder_stamp(path: str) -> str:
    """The path of a model and, for a folder, 12 hexadecimal digits that change when its files are written again.

    Files are listed, not read: a cheap test for commands that may continue only with the same files.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    stats = []
    for file in (*folder.iterdir(), *folder.glob("adapter/*")):
        if file.is_file():
            stat = file.stat()
            stats.append((str(file.relative_to(folder)), stat.st_size, stat.st_mtime_ns))
    return f"{os.path.abspath(path)} (files {content_hash(repr(sorted(stats)))[:12]})"
