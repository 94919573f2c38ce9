# SPDX-License-Identifier: Apache-2.0
"""Weights that are cut as they are loaded, on one process; on two: distributed/test_zero3.py."""

import json
import os
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapter_cases import write_head_adapter
from closeness import EPS, FORWARD
from dschat.base.errors import UserError
from dschat.engine.sharded_loading import SEQUENTIAL_LOAD_VARIABLE
from dschat.models.classifiers import load_scalar
from dschat.models.finetuning import Finetuning, choose_trained, require_trainable_tokens
from dschat.models.load import load_causal_lm
from dschat.models.opening import LoadOptions
from dschat.training.steps.engines import placement_of
from factories import (
    engine_of,
    largest_difference,
    make_causal_lm,
    make_classifier,
    make_tokenizer,
    save_folder,
    whole_state,
)
from sharded_loading_checks import compare, loader, save_special, settings_of


@pytest.fixture
def settings(group, tmp_path):
    return settings_of(tmp_path)


def is_in_parts(parameter):
    return hasattr(parameter, "ds_id") and parameter.numel() == 0


def test_every_weight_of_the_files_is_cut_on_arrival(settings, tokenizer, tmp_path, monkeypatch):
    """The score head of a causal LM comes from no file; nothing of the way of loading stays behind."""
    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)
    monkeypatch.setenv(SEQUENTIAL_LOAD_VARIABLE, "0")
    placement = placement_of(settings)
    with placement.while_loading():
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(is_in_parts(p) for p in model.parameters())
    assert os.environ[SEQUENTIAL_LOAD_VARIABLE] == "0"
    monkeypatch.delenv(SEQUENTIAL_LOAD_VARIABLE)
    critic = load_scalar(folder, "--m", torch.float32, tokenizer, load_options=LoadOptions(placement))
    assert all(is_in_parts(p) for p in critic.parameters()) and not bool(critic.score.weight.ds_tensor.any())
    assert SEQUENTIAL_LOAD_VARIABLE not in os.environ
    assert not any(hasattr(p, "ds_id") for p in AutoModelForCausalLM.from_pretrained(folder).parameters())


def test_a_new_reward_head_in_parts_is_the_whole_one(settings, tmp_path, tokenizer):
    folder = save_folder(tmp_path / "lm", make_causal_lm("llama"), tokenizer)
    found = compare(loader(partial(load_scalar, head_seed=3), folder, tokenizer, torch.float32), settings)
    assert found["differ"] == []


def test_a_tie_that_does_not_hold_is_not_made(settings, tmp_path, tokenizer):
    save_special(tmp_path)
    found = compare(loader(load_causal_lm, str(tmp_path / "odd"), tokenizer, torch.float32), settings)
    assert found["differ"] == [] and found["shared"]


@pytest.mark.parametrize(("targets", "saved"), [(["q_proj"], ["lm_head"]), (["q_proj", "lm_head"], [])])
def test_an_adapter_of_a_tied_head_unties_it_in_parts_too(targets, saved, settings, tmp_path, tokenizer):
    base = save_folder(tmp_path / "base", make_causal_lm(tie_word_embeddings=True), tokenizer)
    folder = write_head_adapter(tmp_path / "adapter", base, targets, saved)
    found = compare(
        lambda load_options: load_causal_lm(str(folder), "--m", torch.float32, tokenizer, load_options=load_options),
        settings,
    )
    assert found["differ"] == [] and found["shared"] and found["configs"]


def test_added_tokens_that_would_stay_untrained_are_seen_in_parts(settings, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "<tool>"])
    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)
    placement = placement_of(settings)
    model = load_causal_lm(folder, "--m", torch.float32, tokenizer, load_options=LoadOptions(placement))
    choose_trained(model, Finetuning(rank=2), folder)
    with pytest.raises(UserError, match="all nearly equal: <tool>"):
        require_trainable_tokens(model, tokenizer, [[5, 101]], placement, "--m")
    assert all(hasattr(parameter, "ds_id") for name, parameter in model.named_parameters() if "lora" not in name)


def test_weights_that_a_folder_lacks_are_named(settings, tmp_path, tokenizer):
    """Of a reward model whose config does not say that it is one."""
    folder = save_folder(tmp_path, make_classifier("llama", tie_word_embeddings=False), tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    load_options = LoadOptions(placement_of(settings))
    with pytest.raises(UserError, match=r"--m .*lm_head\.weight\. .*a reward model has no language-model head"):
        load_causal_lm(folder, "--m", torch.float32, tokenizer, load_options=load_options)


def test_weight_decay_acts_on_matrices_in_parts(settings, tmp_path, tokenizer):
    """In parts, all weights are flat."""
    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)
    model = load_causal_lm(folder, "--m", torch.float32, tokenizer, load_options=LoadOptions(placement_of(settings)))
    engine = engine_of(model, zero_stage=3, learning_rate=0.1, weight_decay=0.5, config_file=settings.config_file)
    before = whole_state(engine)
    loss = 0.0 * sum(p.sum() for p in engine.module(torch.tensor([[1, 5, 6]]), torch.ones(1, 3, dtype=torch.bool), 2))
    engine.backward(loss)
    engine.step()
    after = whole_state(engine)
    expected = {name: x * (1 - 0.1 * 0.5) if x.dim() >= 2 else x for name, x in before.items()}
    assert largest_difference(after, expected) < FORWARD * EPS / 10
