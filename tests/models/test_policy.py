# SPDX-License-Identifier: Apache-2.0
"""PolicyModel against the logits of Hugging Face's own forward, one unpadded row at a time."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, OPTConfig

from closeness import UPDATE, assert_near
from dschat.models.backbone import position_ids
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.models.save import save_model
from factories import KINDS, hf_logprobs, make_causal_lm, pad_rows, ragged_rows, save_folder, saved_weights

ROWS = ragged_rows([2, 5, 9], [7, 1, 4])
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# Families whose logits are more than a product of last states and a head: scaled, or projected before.
OTHER_HEADS = {
    "granite": GraniteConfig(**SIZES, intermediate_size=64, initializer_range=0.3, logits_scaling=0.5),
    "cohere": CohereConfig(**SIZES, intermediate_size=64, initializer_range=0.3, logit_scale=0.25),
    "opt": OPTConfig(**SIZES, ffn_dim=64, init_std=0.3, word_embed_proj_dim=16),
}


def on_response(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, x, 0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_entropy_are_those_of_the_models_own_logits(kind, temperature):
    causal_lm = make_causal_lm(kind)
    ids, attention_mask, mask = pad_rows(ROWS)
    with torch.no_grad():
        logprobs, entropy = PolicyModel(causal_lm)(ids, attention_mask, mask.shape[1], temperature)
    assert logprobs.shape == entropy.shape == mask.shape
    assert logprobs.dtype == entropy.dtype == torch.float32
    for row, (tokens, own_logprobs, own_entropy) in enumerate(zip(ROWS, logprobs, entropy, strict=True)):
        expected_logprobs, expected_entropy = hf_logprobs(causal_lm, tokens, temperature)
        length = len(tokens[1])
        assert_near(own_logprobs[:length], expected_logprobs)
        assert_near(own_entropy[:length], expected_entropy, message=f"row {row}")


@pytest.mark.parametrize("kind", OTHER_HEADS)
def test_heads_of_other_families(kind):
    """In a batch with more padding than it needs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        causal_lm = AutoModelForCausalLM.from_config(OTHER_HEADS[kind]).eval()
    ids, attention_mask, mask = pad_rows(ROWS, left=3, right=2)
    with torch.no_grad():
        logprobs, entropy = PolicyModel(causal_lm)(ids, attention_mask, mask.shape[1])
    for tokens, *found in zip(ROWS, logprobs, entropy, strict=True):
        for own, expected in zip(found, hf_logprobs(causal_lm, tokens), strict=True):
            assert_near(own[: len(expected)], expected)


def test_gemma_2s_soft_cap_matters():
    causal_lm = make_causal_lm("gemma2")
    ids, attention_mask, mask = pad_rows(ROWS)
    with torch.no_grad():
        policy = PolicyModel(causal_lm)
        with_cap, _ = policy(ids, attention_mask, mask.shape[1])
        policy.to_logits = causal_lm.lm_head
        without_cap, _ = policy(ids, attention_mask, mask.shape[1])
    assert float(on_response(with_cap - without_cap, mask).abs().max()) > 0.1


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 4), (5, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_changes_nothing(kind, left, right):
    policy = PolicyModel(make_causal_lm(kind))
    ids, attention_mask, mask = pad_rows(ROWS)
    with torch.no_grad():
        plain = policy(ids, attention_mask, mask.shape[1])
        wide = policy(*pad_rows(ROWS, left, right)[:2], mask.shape[1] + right)
    for x, y in zip(plain, wide, strict=True):
        y = y[:, : mask.shape[1]]
        assert_near(on_response(x, mask), on_response(y, mask))


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


@pytest.mark.parametrize(
    ("kind", "dropout"),
    [("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}), ("llama", {"attention_dropout": 0.5})],
)
def test_dropout_is_off_whatever_the_checkpoint_says(kind, dropout, tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_causal_lm(kind, **dropout), tokenizer)
    policy = PolicyModel(load_causal_lm(folder, "--m", torch.float32, tokenizer))
    ids, attention_mask, mask = pad_rows(ROWS)
    with torch.no_grad():
        evaluated, _ = policy.eval()(ids, attention_mask, mask.shape[1])
        trained, _ = policy.train()(ids, attention_mask, mask.shape[1])
    assert torch.equal(evaluated, trained)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_actor_opens_in_plain_transformers_with_the_same_outputs(kind, tokenizer, tmp_path):
    from transformers import AutoTokenizer

    policy = PolicyModel(make_causal_lm(kind))
    save_model(policy.inner, saved_weights(policy.inner), tokenizer, tmp_path)
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids, attention_mask, mask = pad_rows(ROWS)
    with torch.no_grad():
        logprobs, _ = policy(ids, attention_mask, mask.shape[1])
    for tokens, own in zip(ROWS, logprobs, strict=True):
        expected, _ = hf_logprobs(reopened, tokens)
        assert_near(own[: len(tokens[1])], expected)
    tied = reopened.get_input_embeddings().weight is reopened.get_output_embeddings().weight
    assert tied == reopened.config.tie_word_embeddings
    files = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()
