# SPDX-License-Identifier: Apache-2.0
"""A critic with bins: how its head begins, and where its folder opens again. Training: test_critic_updates.py."""

import re

import pytest
import torch

from closeness import FORMULA, assert_near
from dschat.base.errors import UserError
from dschat.models.classifiers import load_classifier, load_critic, load_trained_scalar
from dschat.models.load import load_causal_lm
from dschat.models.lora import add_lora
from dschat.models.opening import DEFAULT_OPTIONS
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel
from dschat.models.value_head import load_binned_critic, value_example
from factories import make_causal_lm, make_classifier, save_folder, saved_weights
from macro_actions.value_bins import ValueBins

BINS = ValueBins.between(-1.0, 3.0)
IDS = torch.tensor([[5, 9, 12, 7, 30, 8]])


def opened(path, tokenizer, bins=BINS):
    return load_binned_critic(bins, path, "--critic", torch.float32, tokenizer, DEFAULT_OPTIONS, may_grow=True)


def values(model):
    with torch.no_grad():
        return ScalarModel(model, BINS)(IDS, None)


def test_values_begin_at_the_middle(tokenizer, tmp_path, caplog):
    caplog.set_level("INFO")
    model = opened(save_folder(tmp_path / "sft", make_causal_lm(), tokenizer), tokenizer)
    assert model.score.weight.shape == (101, model.config.hidden_size) and not model.score.weight.any()
    assert_near(values(model), torch.ones(1, 6), FORMULA)
    assert "a value head with 101 bins from -1 to 3; values begin at 1" in caplog.text


def test_values_begin_at_the_middle_plus_the_reward_models_score(tokenizer, tmp_path):
    reward = make_classifier()
    with torch.no_grad():
        reward.score.weight.mul_(0.05 / ScalarModel(reward)(IDS, None).abs().max())
        scores = ScalarModel(reward)(IDS, None)
    model = opened(save_folder(tmp_path / "reward", reward, tokenizer), tokenizer)
    assert float((values(model) - 1 - scores).abs().max()) < 0.05**3


@pytest.fixture
def saved(tokenizer, tmp_path):
    """The folder of a critic with bins, as a run saves it."""
    model = opened(save_folder(tmp_path / "reward", make_classifier(), tokenizer), tokenizer)
    torch.nn.init.normal_(model.score.weight, std=0.3)  # as if trained
    save_model(model, saved_weights(model), tokenizer, tmp_path / "critic")
    return str(tmp_path / "critic"), values(model)


def test_it_opens_again_with_its_own_range_alone_and_is_nothing_but_a_critic(saved, tokenizer):
    path, expected = saved
    assert_near(values(opened(path, tokenizer)), expected, FORMULA)
    for load in (load_trained_scalar, load_classifier, load_causal_lm):
        with pytest.raises(UserError, match="[Aa] reward model must have one label|writes no text"):
            load(path, "--m", torch.float32, tokenizer)
    with pytest.raises(UserError, match="--critic .*: a critic with bins for other returns: give --value_range -1 3"):
        opened(path, tokenizer, ValueBins.between(0.0, 1.0))
    with pytest.raises(UserError, match="A critic with bins cannot score: give it to step 3 as the critic"):
        load_critic(path, "--critic", torch.float32, tokenizer)


def test_adapters_are_merged_into_it(tokenizer, tmp_path):
    path = save_folder(tmp_path / "sft", make_causal_lm(), tokenizer)
    model = opened(path, tokenizer)
    add_lora(model, 2, None, path)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    save_model(model, saved_weights(model), tokenizer, tmp_path / "critic")
    again = opened(str(tmp_path / "critic"), tokenizer)
    assert_near(values(again), values(model))


def test_the_card_computes_a_value(tokenizer, saved, capsys):
    path, expected = saved
    model = opened(path, tokenizer)
    exec(value_example(), {"model": model.eval(), "tokenizer": lambda text, return_tensors: {"input_ids": IDS}})
    printed = re.search(r"tensor\(\[(.*?)\]", capsys.readouterr().out)
    assert float(printed[1]) == pytest.approx(float(expected[0, -1]), abs=1e-4)
