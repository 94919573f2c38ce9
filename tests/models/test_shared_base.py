# SPDX-License-Identifier: Apache-2.0
"""Classifiers on a causal LM's own weights, against those that transformers opens."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from adapter_cases import MERGED, add_filled_lora, merged_by_peft
from closeness import FORMULA, assert_near
from dschat.base.errors import UserError
from dschat.models.adapters import find_adapter
from dschat.models.classifiers import load_critic, load_scalar
from dschat.models.load import load_causal_lm
from dschat.models.lora import add_lora, load_adapter
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import load_tokenizer
from dschat.quickstart.synthetic import make_rows, row_texts
from dschat.training.steps.shared_base import classifier_beside
from factories import largest_difference, make_causal_lm, save_folder, saved_weights
from sharded_loading_checks import FAMILIES

FLAG = "--critic_model_name_or_path"
IDS = torch.tensor([[5, 9, 12, 7, 30, 8], [6, 7, 8, 9, 10, 11]])
MASK = torch.tensor([[False, False, True, True, True, True], [True] * 6])


def filled(model, rank=2):
    """With adapters and a head of random numbers, the same in every model of a shape."""
    add_filled_lora(model, rank, "base")
    return ScalarModel(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_classifier_is_that_of_transformers(name, tmp_path):
    path = FAMILIES[name].save(tmp_path, row_texts(make_rows(100, 1, "demonstrations")))
    tokenizer = load_tokenizer(path, FLAG)
    causal_lm = load_causal_lm(path, FLAG, torch.float32, tokenizer)
    own = classifier_beside(causal_lm, FLAG)
    torch.manual_seed(2)
    theirs = load_critic(path, FLAG, torch.float32, tokenizer)
    assert type(own).__name__ == type(theirs).__name__ and not own.score.weight.any()
    assert own.config.num_labels == 1 and own.config.to_dict().keys() == theirs.config.to_dict().keys()
    kept = {p.data_ptr() for p in causal_lm.parameters()}
    assert all(p.data_ptr() in kept for name, p in own.named_parameters() if not name.startswith("score."))
    first, second = filled(own), filled(theirs)
    for mask in (None, MASK):
        difference = (first(IDS, mask) - second(IDS, mask)).abs()
        assert float(torch.where(MASK, difference, 0.0).max()) < 1e-6
    with torch.no_grad():
        assert float(first(IDS, None).abs().max()) > 0.01


def test_a_saved_adapter_gives_the_same_numbers(tokenizer, tmp_path):
    base = save_folder(tmp_path / "base", make_causal_lm(), tokenizer)
    trained = filled(load_scalar(base, FLAG, torch.float32, tokenizer), rank=3)
    save_model(trained.inner, trained.inner.named_parameters(), tokenizer, tmp_path / "reward", merge=False)
    causal_lm = load_causal_lm(base, FLAG, torch.float32, tokenizer)
    again = classifier_beside(causal_lm, FLAG)
    load_adapter(again, find_adapter(str(tmp_path / "reward")), FLAG, base)
    assert_near(ScalarModel(again)(IDS, None), trained(IDS, None), FORMULA)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in trained.inner.parameters()]
    assert find_adapter(None) is None and find_adapter(base) is None


@pytest.mark.parametrize(("settings", "kind"), [("rslora", "gpt2"), ("alpha_pattern", "gemma")])
def test_a_users_adapter_is_merged_as_peft_merges_it(settings, kind, tokenizer, tmp_path):
    base, folder, expected = merged_by_peft(tmp_path, kind, settings, tokenizer)
    model = classifier_beside(load_causal_lm(base, FLAG, torch.float32, tokenizer), FLAG)
    load_adapter(model, folder, FLAG, base)
    save_model(model, saved_weights(model), tokenizer, tmp_path / "saved")
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    assert largest_difference(found, expected) < MERGED


def test_a_weight_beside_a_and_b_is_not_passed_over_when_adapters_are_merged(tokenizer, tmp_path):
    model = make_causal_lm()
    add_lora(model, 2, ["q_proj"], "base")
    layer = next(name for name, _ in model.named_parameters() if "lora_B" in name).partition(".lora_B")[0]
    odd = (f"{layer}.lora_magnitude_vector.default.weight", torch.ones(32))
    with pytest.raises(UserError, match="lora_magnitude_vector.*--no_merge_lora"):
        save_model(model, [*saved_weights(model), odd], tokenizer, tmp_path)
