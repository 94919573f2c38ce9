# SPDX-License-Identifier: Apache-2.0
"""Hashes of models: adapters that name each other, damaged files, and models on the hub."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from dschat.base import fingerprints
from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash, contents_hash, model_hash


def write_adapter(folder: Path, base: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))


def test_adapters_that_name_each_other_have_a_hash(tmp_path):
    """Each is hashed with the other's config; opening such a model is refused elsewhere."""
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    write_adapter(first, second)
    write_adapter(second, first)
    configs = [(folder / "adapter_config.json").read_text() for folder in (first, second)]
    assert model_hash(str(first)) == contents_hash([configs[0], content_hash(configs[1])])
    assert model_hash(str(second)) == contents_hash([configs[1], content_hash(configs[0])])


@pytest.mark.parametrize(
    "start", [b"\xff" * 8, b"\xff" * 7 + b"\x00", b"\x02" + b"\x00" * 7 + b"[]", b"\x07" + b"\x00" * 7 + b'{"a":1}']
)
def test_a_damaged_weight_file_is_named(start, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "END_BYTES", 8)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(start.ljust(32, b"\x01"))
    with pytest.raises(UserError, match=r"model.safetensors has no header of a safetensors file: .* copy the model"):
        model_hash(str(tmp_path))


@pytest.mark.parametrize(("commit", "expected"), [("abc123", "abc123"), (None, "owner/name")])
def test_a_model_on_the_hub_is_its_commit(commit, expected, monkeypatch):
    """Two models whose commits are not known are not the same."""
    config = SimpleNamespace(_commit_hash=commit)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda path, **options: config)
    assert model_hash("owner/name") == expected
