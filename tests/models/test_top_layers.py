# SPDX-License-Identifier: Apache-2.0
"""Which weights train when only the topmost layers do."""

import pytest

from dschat.errors import UserError
from dschat.models.finetuning import train_top_layers
from factories import KINDS, make_causal_lm

TOP = {
    "gemma": ("model.layers.1.", "model.norm."),
    "gemma2": ("model.layers.1.", "model.norm."),
    "llama": ("model.layers.1.", "model.norm."),
    "gpt2": ("transformer.h.1.", "transformer.ln_f."),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_layer_and_the_norm_behind_it(kind):
    model = make_causal_lm(kind)
    train_top_layers(model, 1, "--trained_layers")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.startswith(TOP[kind])}
    assert len(trained) > 5


def test_opt_keeps_its_norm_before_its_layers():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 50}
    model = OPTForCausalLM(OPTConfig(word_embed_proj_dim=8, **sizes))
    train_top_layers(model, 2, "--trained_layers")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    places = ("model.decoder.layers.1.", "model.decoder.layers.2.", "model.decoder.final_layer_norm.")
    assert trained == {name for name, _ in model.named_parameters() if name.startswith(places)}


def test_more_layers_than_there_are():
    with pytest.raises(UserError, match="--trained_layers 3: the model has 2 layers"):
        train_top_layers(make_causal_lm(), 3, "--trained_layers")
