# SPDX-License-Identifier: Apache-2.0
"""The actor's weights under the names of the plain model."""

import torch

from dschat.models.lora import add_lora
from dschat.rollouts.vllm_weights import plain_weights
from factories import engine_of, make_causal_lm, pad_rows, ragged_rows


def test_they_are_the_models_own_and_copies(group):
    causal_lm = make_causal_lm("llama", tie_word_embeddings=False)
    expected = {name: x.clone() for name, x in causal_lm.named_parameters()}
    found = dict(plain_weights(engine_of(causal_lm)))
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            parameter.zero_()
    assert found.keys() == expected.keys() and "lm_head.weight" in found
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_adapters_are_merged_layer_by_layer(group):
    """A plain model with the weights computes what the model with adapters does."""
    causal_lm = make_causal_lm("gemma")
    add_lora(causal_lm, 2, None, "base")
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    actor = engine_of(causal_lm)
    found = dict(plain_weights(actor))
    plain = make_causal_lm("gemma", seed=1)
    plain.load_state_dict(found, strict=False)
    assert found.keys() == dict(plain.named_parameters()).keys()
    ids, _, _ = pad_rows(ragged_rows([4, 4], [3, 3]))
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, causal_lm(ids).logits, rtol=1e-5, atol=1e-5)
