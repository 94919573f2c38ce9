# SPDX-License-Identifier: Apache-2.0
"""What two things must share to be called the same: the one hash of a file, of a tokenizer and of a model."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Settings of a tokenizer that say where it lies, not what it does.
PLACES = ("name_or_path", "vocab_file", "merges_file", "tokenizer_file", "tokenizer_object", "special_tokens_map_file")
SAMPLE = 1 << 20  # bytes at either end of a weight file that go into a model's hash
INNER_SAMPLE = 1 << 12  # bytes at the beginning of every weight of a file that is larger than both ends


def content_hash(content: str | bytes) -> str:
    """SHA-256 of bytes, or of text in UTF-8 with a ? for each lone surrogate."""
    return contents_hash([content])


def contents_hash(contents: Iterable[str | bytes]) -> str:
    """The same of one text after the other, which need not be in memory together."""
    whole = hashlib.sha256()
    for content in contents:
        whole.update(content.encode("utf-8", "replace") if isinstance(content, str) else content)
    return whole.hexdigest()


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
    return content_hash(json.dumps(whole, sort_keys=True, default=str))


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for two tokenizers whose chat templates write the same texts.

    The template and those special tokens that it names count; a pad token that step 1 adds does not, for instance.
    """
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in template}
    return content_hash(json.dumps([template, special], sort_keys=True))


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


def model_hash(path: str) -> str:
    """Of a folder: its config and, of each weight file, the length and both ends. From the hub: the commit.

    Of files that are larger than both ends, the beginning of every weight counts, too. A folder without a model of
    its own may hold an adapter, in itself or in ``adapter``, whose base counts, too, where it is a folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        from transformers import AutoConfig

        return str(getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "_commit_hash", None))
    places = [folder / "config.json", folder / "adapter_config.json", folder / "adapter" / "adapter_config.json"]
    config = next((place for place in places if place.is_file()), places[0])
    folder, whole = config.parent, hashlib.sha256(config.read_bytes())
    base = json.loads(config.read_bytes()).get("base_model_name_or_path") if config != places[0] else None
    if isinstance(base, str) and Path(base).is_dir() and Path(base).resolve() != Path(path).resolve():
        whole.update(model_hash(base).encode())
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            size = file.stat().st_size
            whole.update(f"{file.name} {size}".encode() + stream.read(SAMPLE))
            stream.seek(max(0, size - SAMPLE))
            whole.update(stream.read(SAMPLE))
            if size > 2 * SAMPLE:
                for start, end in _places(stream):
                    stream.seek(start)
                    whole.update(stream.read(min(INNER_SAMPLE, end - start)))
    return whole.hexdigest()


def _places(stream: BinaryIO) -> list[tuple[int, int]]:
    """Where the weights of a safetensors file begin and end, from its header."""
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    weights = (entry for name, entry in json.loads(stream.read(length)).items() if name != "__metadata__")
    return sorted((8 + length + start, 8 + length + end) for start, end in (w["data_offsets"] for w in weights))


def folder_stamp(path: str) -> str:
    """A model's place and, of a folder, 12 hexadecimal digits that change when its files are written again.

    Nothing is read: for whoever may go on only with the very same files.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    files = [file for file in (*folder.iterdir(), *folder.glob("adapter/*")) if file.is_file()]
    stats = sorted((str(file.relative_to(folder)), file.stat()) for file in files)
    listing = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return f"{os.path.abspath(path)} (files {content_hash(listing)[:12]})"
