# SPDX-License-Identifier: Apache-2.0
"""PolicyModel against the logits of Hugging Face's own forward, one unpadded row at a time."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, OPTConfig

from closeness import UPDATE, assert_near
from dschat.models.backbone import position_ids
from dschat.models.policy import PolicyModel
from factories import KINDS, hf_logprobs, make_causal_lm, pad_rows, ragged_rows

ROWS = ragged_rows([2, 5, 9], [7, 1, 4])
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# Families whose logits are more than a product of last states and a head: scaled, or projected before.
OTHER_HEADS = {
    "granite": GraniteConfig(**SIZES, intermediate_size=64, initializer_range=0.3, logits_scaling=0.5),
    "cohere": CohereConfig(**SIZES, intermediate_size=64, initializer_range=0.3, logit_scale=0.25),
    "opt": OPTConfig(**SIZES, ffn_dim=64, init_std=0.3, word_embed_proj_dim=16),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", [*KINDS, *OTHER_HEADS])
def test_log_probs_and_entropy_are_those_of_the_models_own_logits(kind, temperature):
    """With as much padding as the rows need, and with more on either side."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config
        causal_lm = made(OTHER_HEADS[kind]).eval() if kind in OTHER_HEADS else make_causal_lm(kind)
    for left, right in ((0, 0), (3, 0), (0, 4), (5, 2)):
        ids, attention_mask, mask = pad_rows(ROWS, left, right)
        with torch.no_grad():
            logprobs, entropy = PolicyModel(causal_lm)(ids, attention_mask, mask.shape[1], temperature)
        assert logprobs.shape == entropy.shape == mask.shape
        assert logprobs.dtype == entropy.dtype == torch.float32
        for tokens, *found in zip(ROWS, logprobs, entropy, strict=True):
            for own, expected in zip(found, hf_logprobs(causal_lm, tokens, temperature), strict=True):
                assert_near(own[: len(expected)], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_models_own_logits(kind):
    causal_lm = make_causal_lm(kind)
    twin = copy.deepcopy(causal_lm)
    prompt, response = ROWS[0]
    ids = torch.tensor([prompt + response])
    logprobs, entropy = PolicyModel(causal_lm)(ids, torch.ones_like(ids, dtype=torch.bool), len(response), 0.7)
    assert not entropy.requires_grad
    logprobs.sum().backward()
    logits = twin(input_ids=ids).logits[:, len(prompt) - 1 : -1] / 0.7
    logits.log_softmax(-1).gather(-1, torch.tensor([response])[..., None]).sum().backward()
    for (name, p), q in zip(causal_lm.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert_near(p.grad, q.grad, UPDATE, message=name)


def test_only_the_hugging_face_model_owns_parameters():
    causal_lm = make_causal_lm("gemma")
    names = dict(PolicyModel(causal_lm).named_parameters())
    assert names.keys() == {f"inner.{name}" for name, _ in causal_lm.named_parameters()}


def test_positions_count_real_tokens():
    mask = torch.tensor([[False, False, True, True, True, False], [True, True, True, True, True, True]])
    positions = position_ids(make_causal_lm("gemma").model, mask)["position_ids"]
    assert positions[0, 2:5].tolist() == [0, 1, 2]
    assert positions[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert int(positions.min()) == 0


def test_no_positions_for_a_backbone_that_takes_none():
    class Alibi(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            return input_ids

    assert position_ids(Alibi(), torch.ones(1, 2, dtype=torch.bool)) == {}
