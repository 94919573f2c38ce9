# SPDX-License-Identifier: Apache-2.0
"""Folders that are written from a stream of weights, against those that transformers writes from a whole model."""

import json
import logging
import os
import stat
import weakref

import pytest
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, HrmTextConfig

from dschat.base.errors import UserError
from dschat.models import save
from dschat.models.save import save_model
from dschat.models.tiny import make_model
from dschat.run.model_folders import ModelFolders, SavedModel
from factories import engine_of, largest_difference, make_causal_lm, ppo_config, run_of, saved_weights
from model_families import MODEL_FAMILIES

TEXTS = ["the quick brown fox jumps over the lazy dog"] * 20
LIMIT = 20_000  # bytes of a file; the largest weight has 12,800


def weights_in(folder):
    """All weights of a folder, by name."""
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


@pytest.mark.parametrize("kind", MODEL_FAMILIES)
def test_a_folder_is_what_transformers_writes(kind, tokenizer, tmp_path):
    """Names and weights, as of tied heads and experts, and the files that a model is opened by."""
    path = MODEL_FAMILIES[kind].save(tmp_path / "base", TEXTS)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.use_cache = True
    model.save_pretrained(tmp_path / "expected")
    tokenizer.save_pretrained(tmp_path / "expected")
    model.config.use_cache = False  # as in folders that others saved after training
    save_model(model, saved_weights(model), tokenizer, tmp_path / "saved")
    expected, found = weights_in(tmp_path / "expected"), weights_in(tmp_path / "saved")
    assert largest_difference(expected, found) == 0
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        own, theirs = (json.loads((tmp_path / place / file).read_text()) for place in ("saved", "expected"))
        assert own == theirs


def test_a_large_model_lies_in_several_files(tokenizer, tmp_path):
    model = make_causal_lm("llama", tie_word_embeddings=False)
    save_model(model, saved_weights(model), tokenizer, tmp_path, file_size=LIMIT)
    plan = split_torch_state_dict_into_shards(dict(saved_weights(model)), max_shard_size=LIMIT)
    files = {file.name: set(load_file(file)) for file in tmp_path.glob("*.safetensors")}
    assert files == {name: set(weights) for name, weights in plan.filename_to_tensors.items()} and len(files) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == plan.tensor_to_filename
    assert index["metadata"] == plan.metadata | {"total_parameters": sum(p.numel() for p in model.parameters())}
    opened = type(model).from_pretrained(tmp_path)
    assert largest_difference(dict(opened.named_parameters()), dict(model.named_parameters())) == 0


def test_weights_of_one_file_are_held_at_a_time(tokenizer, tmp_path, monkeypatch):
    copies, copied = weakref.WeakSet(), save._copied

    def noted(tensor):
        copy = copied(tensor)
        copies.add(copy)
        return copy

    monkeypatch.setattr(save, "_copied", noted)
    model, held = make_causal_lm("llama"), []

    def weights():
        for name, tensor in saved_weights(model):
            held.append(sum(copy.nbytes for copy in copies))
            yield name, tensor

    save_model(model, weights(), tokenizer, tmp_path, file_size=LIMIT)
    assert 0.5 * LIMIT < max(held) <= LIMIT < 0.3 * sum(tensor.nbytes for _, tensor in saved_weights(model))


def test_weights_that_a_family_keeps_together_are_saved_under_their_names_in_transformers(tokenizer, tmp_path, caplog):
    """This family's own folders hold four matrices as one; they would all have to be waited for."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = HrmTextConfig(vocab_size=100, head_dim=8, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    with caplog.at_level(logging.WARNING):
        save_model(model, saved_weights(model), tokenizer, tmp_path)
    assert "weights of HrmTextForCausalLM keep the names that they have in transformers" in caplog.messages
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert largest_difference(dict(opened.named_parameters()), dict(model.named_parameters())) == 0


def test_every_weight_is_asked_for_although_the_first_model_cannot_be_written(tokenizer, tmp_path, group, monkeypatch):
    """Other processes give their parts of every weight of every model; they would wait for ever."""
    asked = []

    class Noting:
        def __init__(self, engine, name):
            self.module, self._engine, self._name = engine.module, engine, name

        def whole_weights(self):
            for name, tensor in self._engine.whole_weights():
                asked.append((self._name, name))
                yield name, tensor

    def full(*_args, **_kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(save, "save_tensors", full)
    engine = engine_of(make_causal_lm())
    models = [SavedModel(Noting(engine, name), name, "base", name) for name in ("actor", "critic")]
    config = ppo_config(tmp_path)
    with pytest.raises(UserError, match="No space left on device"):
        ModelFolders(models, tokenizer, config, run_of("ppo", config)).save_final()
    names = [name for name, _ in engine.whole_weights()]
    assert asked == [(model, name) for model in ("actor", "critic") for name in names]
    assert not (tmp_path / "actor").exists()


def test_weights_can_be_read_by_whom_the_umask_allows(tokenizer, tmp_path):
    """safetensors alone writes them for their owner, so that others could read config.json and not the weights."""
    model = make_causal_lm()
    earlier_mask = os.umask(0o027)
    try:
        save_model(model, saved_weights(model), tokenizer, tmp_path / "saved")
        make_model(tmp_path / "tiny", ["some text"])
    finally:
        os.umask(earlier_mask)
    for folder in ("saved", "tiny"):
        permissions = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / folder).iterdir()}
        assert permissions["model.safetensors"] == permissions["config.json"] == 0o640
