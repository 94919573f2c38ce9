# SPDX-License-Identifier: Apache-2.0
"""Hashes of models: adapters that name each other, damaged files, and models on the hub."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from dschat.base import fingerprints
from dschat.base.errors import UserError
from dschat.base.fingerprints import content_hash, folder_stamp, model_hash, tokenizer_fingerprint
from factories import make_tokenizer


def write_adapter(folder: Path, base: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))


def write_bases(folder: Path, **content: str) -> None:
    """Folders of models, each with a config.json."""
    for name, text in content.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text)


def test_adapters_that_name_each_other_have_a_hash(tmp_path):
    """Each is hashed with the other's hash for its path; opening such a model is refused elsewhere."""
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    write_adapter(first, second)
    write_adapter(second, first)
    configs = [(folder / "adapter_config.json").read_text() for folder in (first, second)]
    for folder, other_config in ((first, configs[1]), (second, configs[0])):
        expected = json.dumps({"base_model_name_or_path": content_hash(other_config)})
        assert model_hash(str(folder)) == content_hash(expected)


def test_an_adapter_whose_base_has_moved_keeps_its_hash(tmp_path):
    write_bases(tmp_path, base="{}", moved="{}", other="[]")
    hashes = []
    for name in ("base", "moved", "other"):
        write_adapter(tmp_path / "adapter", tmp_path / name)
        hashes.append(model_hash(str(tmp_path / "adapter")))
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_config_of_the_base_beside_an_adapter_hides_nothing(tmp_path):
    """Some programs write it there; base and settings of the adapter count all the same."""
    write_bases(tmp_path, base="{}", other="[]")
    folder = tmp_path / "adapter"
    hashes = []
    for name in ("base", "other"):
        write_adapter(folder, tmp_path / name)
        (folder / "config.json").write_text("{}")
        save_file({"a": torch.zeros(2)}, folder / "adapter_model.safetensors")
        hashes.append(model_hash(str(folder)))
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("content", [b"\xff" * 32, b"\x02" + b"\x00" * 7 + b"[]", b""])
def test_a_damaged_weight_file_is_named(content, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model.safetensors is damaged .*: copy the model"):
        model_hash(str(tmp_path))


@pytest.mark.parametrize("row", [0, -1])
def test_a_model_s_hash_sees_both_ends_of_every_weight(row, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.tensor(0.0)}
    hashes = set()
    for changed in ("none", *weights):
        tensors = {name: weight.clone() for name, weight in weights.items()}
        if changed in tensors:
            tensors[changed].view(-1)[row] = 1.0
        save_file(tensors, tmp_path / "model.safetensors")
        hashes.add(model_hash(str(tmp_path)))
    assert len(hashes) == 4


def test_a_model_on_the_hub_is_its_commit(tmp_path, monkeypatch):
    """In a cache of the hub as huggingface_hub lays it out."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--name"
    for commit in ("a" * 40, "b" * 40):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        assert model_hash("owner/name") == commit
        assert folder_stamp("owner/name") == f"owner/name (commit {commit})"


def test_two_models_whose_commits_are_not_known_are_not_the_same(monkeypatch):
    monkeypatch.setattr(fingerprints, "hub_commit", lambda path: None)
    assert model_hash("owner/name") == "owner/name"


def test_results_beside_a_model_do_not_change_its_stamp(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    stamp = folder_stamp(str(tmp_path))
    (tmp_path / "results.jsonl.partial").write_text("{}")
    assert folder_stamp(str(tmp_path)) == stamp
    (tmp_path / "config.json").write_text("{ }")
    assert folder_stamp(str(tmp_path)) != stamp


def test_a_tokenizer_is_the_same_before_and_after_use_and_with_a_pad_token() -> None:
    tokenizer = make_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["the cat", "a"], padding=True, truncation=True, max_length=3)
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.pad_token = tokenizer.eos_token  # a reserved token becomes the pad token, or the other way round
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_special_tokens({"pad_token": "<filler>"})  # as step 1 does
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["newword"])
    assert tokenizer_fingerprint(tokenizer) != before
    other = make_tokenizer()
    other.eos_token = "a"
    assert tokenizer_fingerprint(other) != before
