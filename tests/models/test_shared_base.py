# SPDX-License-Identifier: Apache-2.0
"""Classifiers on a causal LM's own weights, against those that transformers opens."""

import pytest
import torch

from dschat.data.synthetic import make_rows, row_texts
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.lora import add_lora
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel
from dschat.models.shared_base import classifier_beside, find_adapter, load_adapter
from dschat.models.tokenizer import load_tokenizer
from factories import make_causal_lm, save_folder
from loading_checks import FAMILIES

FLAG = "--critic_model_name_or_path"
IDS = torch.tensor([[5, 9, 12, 7, 30, 8], [6, 7, 8, 9, 10, 11]])
MASK = torch.tensor([[False, False, True, True, True, True], [True] * 6])


def filled(model, rank=2):
    """With adapters and a head of random numbers, the same in every model of a shape."""
    torch.manual_seed(0)
    add_lora(model, rank, None, "base")
    for name, parameter in model.named_parameters():
        if ".lora_B" in name or name.startswith("score."):
            torch.nn.init.normal_(parameter, std=0.3)
    return ScalarModel(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_classifier_is_that_of_transformers(name, tmp_path):
    path = FAMILIES[name].save(tmp_path, row_texts(make_rows(100, 1, "demonstrations")))
    tokenizer = load_tokenizer(path, FLAG, may_add_pad=True)
    causal_lm = load_causal_lm(path, FLAG, torch.float32, tokenizer)
    own = classifier_beside(causal_lm, FLAG)
    torch.manual_seed(2)
    theirs = load_scalar(path, FLAG, torch.float32, tokenizer, for_this_run=True)
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
    torch.testing.assert_close(ScalarModel(again)(IDS, None), trained(IDS, None), rtol=0, atol=1e-6)
    assert {name for name, p in again.named_parameters() if p.requires_grad} == {
        name for name, p in trained.inner.named_parameters() if p.requires_grad
    }
    assert find_adapter(None) is None and find_adapter(base) is None
