# SPDX-License-Identifier: Apache-2.0
"""Folders with pickled weights, pointers of Git LFS, and the vocabulary files that saved folders keep."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSequenceClassification

from adapter_cases import write_users_adapter
from closeness import near
from dschat.base.errors import UserError
from dschat.base.fingerprints import tokenizer_fingerprint
from dschat.models.classifiers import load_trained_scalar
from dschat.models.convert import convert, main
from dschat.models.load import load_causal_lm
from dschat.models.open_errors import refuse_pickles
from dschat.models.pretrained import open_config
from dschat.models.save import save_model
from dschat.models.tokenizer import load_tokenizer, open_tokenizer
from factories import hf_score, largest_difference, make_causal_lm, make_classifier, make_tokenizer, saved_weights
from factories import save_folder as save_hf_folder

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


# Buffers that earlier versions of transformers saved with the weights.
BUFFERS = {"llama": "layers.0.self_attn.rotary_emb.inv_freq", "gpt2": "h.0.attn.bias"}


class RunsCode:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def pickled(folder, model, tokenizer, shards=1):
    """A folder with the weights in pytorch_model.bin, or in several such files and their index; its path."""
    save_hf_folder(folder, model, tokenizer)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return str(folder)
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = names[number::shards]
        torch.save({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return str(folder)


@pytest.mark.parametrize(
    ("make", "dtype", "shards"), [(make_causal_lm, torch.float32, 2), (make_classifier, torch.bfloat16, 1)]
)
def test_a_model_in_pickles_is_refused_with_the_command_that_converts_it(make, dtype, shards, tokenizer, tmp_path):
    model = make("llama").to(dtype)
    folder = pickled(tmp_path / "old", model, tokenizer, shards)
    with pytest.raises(UserError, match=f"--m {folder}: .*pytorch_model.*bin is a pickle") as caught:
        open_config(folder, "--m")
    assert f"`python -m dschat.models.convert {folder} NEW_FOLDER`" in str(caught.value)
    new = str(tmp_path / "new")
    kept = {"generation_config.json": '{"eos_token_id": [2, 5], "temperature": 0.7}', "tokenizer.model": "binary"}
    for name, content in kept.items():
        (tmp_path / "old" / name).write_text(content)
    assert main([folder, new]) == 0
    assert all((tmp_path / "new" / name).read_text() == content for name, content in kept.items())
    load = load_causal_lm if make is make_causal_lm else load_trained_scalar
    assert largest_difference(load(new, "--m", dtype, tokenizer).state_dict(), model.state_dict()) == 0
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert tokenizer_fingerprint(open_tokenizer(new, "--m")) == tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize(("kind", "backbone"), [("llama", "rwtransformer"), ("gpt2", "rwtranrsformer")])
def test_a_reward_model_of_deepspeed_chat_is_converted(kind, backbone, tokenizer, tmp_path):
    """A backbone and v_head; the config is the causal LM's. Its score is that head on the last token's state."""
    save_hf_folder(tmp_path / "old", make_causal_lm(kind), tokenizer)
    plain = AutoModel.from_pretrained(tmp_path / "old", dtype=torch.float32).eval()
    head = torch.randn(1, plain.config.hidden_size, generator=torch.Generator().manual_seed(0))
    (tmp_path / "old" / "model.safetensors").unlink()
    weights = {f"{backbone}.{name}": tensor for name, tensor in plain.state_dict().items()}
    weights[f"{backbone}.{BUFFERS[kind]}"] = torch.ones(1)
    torch.save(weights | {"v_head.weight": head}, tmp_path / "old" / "pytorch_model.bin")
    convert(tmp_path / "old", tmp_path / "new")
    ids = [1, 5, 9, 7, 2]
    with torch.no_grad():
        expected = float(F.linear(plain(torch.tensor([ids])).last_hidden_state[0, -1], head))
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "new").eval()
    assert hf_score(opened, ids) == near(expected)
    load_trained_scalar(str(tmp_path / "new"), "--m", torch.float32, tokenizer)


def with_config(**changes):
    """Changes a folder's config.json."""

    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def with_weights(**changes):
    """Changes a folder's weights by name."""

    def change(folder):
        weights = torch.load(folder / "pytorch_model.bin")
        torch.save(weights | changes, folder / "pytorch_model.bin")

    return change


def saves(content):
    """Writes something else instead of the weights."""
    return lambda folder: torch.save(content, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_weights(extra=torch.ones(1)), "not those of a LlamaForCausalLM.*: extra are missing"),
        (saves({"weight": RunsCode()}), "holds no weights that can be opened without running code"),
        (saves(torch.ones(2)), "holds no weights that can be opened"),
        (lambda folder: (folder / "pytorch_model.bin").unlink(), "no pytorch_model.bin"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "FOLDER .*: this folder holds no tokenizer"),
        (with_config(hidden_size="64"), "error: FOLDER .*'hidden_size': TypeError: .*expected int, got str"),
    ],
)
def test_what_cannot_be_converted_is_said_and_leaves_nothing(
    change, message, tokenizer, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = Path(pickled(tmp_path / "old", make_causal_lm("llama"), tokenizer))
    change(folder)
    assert main([str(folder), "new"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]


def test_a_folder_that_exists_is_not_written(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path)]) == 2 and f"{tmp_path} exists" in capsys.readouterr().err
    assert main([]) == 2 and "NEW_FOLDER" in capsys.readouterr().err


def test_a_pickled_adapter_is_refused_with_the_lines_that_convert_it(tokenizer, tmp_path):
    base = save_hf_folder(tmp_path / "base", make_causal_lm(), tokenizer)
    folder = write_users_adapter(tmp_path / "adapter", base)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="adapter_model.bin is a pickle") as caught:
        open_config(str(folder), "--m")
    exec(str(caught.value).partition("in Python: ")[2], {})
    load_trained_scalar(str(folder), "--m", torch.float32, tokenizer)


# -- Git LFS
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_in_a_model_s_folder_is_named(name, tokenizer, tmp_path):
    folder = save_hf_folder(tmp_path, make_causal_lm(), tokenizer)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError, match=f"--m {folder}: .*/{name} is a pointer of Git LFS.* `git lfs pull`"):
        open_tokenizer(folder, "--m")
        open_config(folder, "--m")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_a_pointer_in_place_of_a_pickle_is_not_to_be_converted(name, tmp_path):
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError, match=f"--m {tmp_path}: .*/{name} is a pointer of Git LFS"):
        refuse_pickles(str(tmp_path), f"--m {tmp_path}")


# -- files of the vocabulary
@pytest.mark.parametrize("added", [[], ["<tool>"]])
def test_vocabulary_files_stay_beside_a_tokenizer_without_new_tokens(added, tmp_path):
    base = save_hf_folder(tmp_path / "base", make_causal_lm(), make_tokenizer())
    for file in ("tokenizer.model", "vocab.txt"):
        (tmp_path / "base" / file).write_bytes(file.encode())
    tokenizer = load_tokenizer(base, "--m")
    tokenizer.add_tokens(added)
    model = make_causal_lm()
    save_model(model, saved_weights(model), tokenizer, tmp_path / "out")
    for file in ("tokenizer.model", "vocab.txt"):
        copied = tmp_path / "out" / file
        assert copied.is_file() is not bool(added)
        assert added or copied.read_bytes() == file.encode()
    again = open_tokenizer(str(tmp_path / "out"), "--m")
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)
