# SPDX-License-Identifier: Apache-2.0
"""How attention is computed: flags that cannot work, and the cap of Gemma-2 against a forward of our own."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from closeness import assert_near
from dschat.builders.ppo import build_ppo_models
from dschat.errors import UserError
from dschat.models import opening
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.opening import Opening, check_attention, say_what_is_used, without_flash
from factories import make_causal_lm, ppo_config, replace_in_builders, save_folder

CAP = 0.7


def test_flash_attention_needs_a_gpu(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = save_folder(tmp_path, make_causal_lm(), tokenizer)
    for load in (load_causal_lm, load_scalar):
        with pytest.raises(UserError, match="--attn_implementation flash_attention_2 needs a GPU. Use .* sdpa"):
            load(folder, "--m", torch.bfloat16, tokenizer, opening=Opening(attention="flash_attention_2"))


def test_flash_attention_needs_half_precision_and_its_package(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # all is asked before one is used
    with pytest.raises(UserError, match="flash_attention_2 computes in half precision only: give --dtype bf16"):
        check_attention("flash_attention_2", torch.float32)
    monkeypatch.setattr(opening, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(UserError, match="flash_attention_2 needs the package flash-attn, which is not installed"):
        check_attention("flash_attention_2", torch.bfloat16)
    monkeypatch.setattr(opening, "is_flash_attn_2_available", lambda: True)
    check_attention("flash_attention_2", torch.bfloat16)
    check_attention("sdpa", torch.float32)


def test_a_family_without_flash_attention_is_named():
    error = ValueError("BloomForCausalLM does not support Flash Attention 2 yet.\nAnd more.")
    message = without_flash("flash_attention_2", "./bloom", error)
    assert message is not None and message.startswith("--attn_implementation flash_attention_2: ./bloom cannot")
    assert "Flash Attention 2 yet. Use --attn_implementation sdpa." in message
    assert without_flash("flash_attention_2", "./bloom", ValueError("no such file")) is None
    assert without_flash("sdpa", "./bloom", error) is None


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar])
@pytest.mark.parametrize("wanted", ["sdpa", "eager"])
def test_models_are_opened_as_the_flag_says(load, wanted, tokenizer, tmp_path, caplog):
    folder = save_folder(tmp_path, make_causal_lm("gemma"), tokenizer)
    model = load(folder, "--m", torch.float32, tokenizer, opening=Opening(attention=wanted))
    assert model.config._attn_implementation == wanted
    expected = make_causal_lm("gemma", attn_implementation="eager")
    ids = torch.tensor([[1, 5, 6, 7]])
    backbone = getattr(model, model.base_model_prefix)
    states = (backbone(ids).last_hidden_state, expected.model(ids).last_hidden_state)
    assert_near(*states)
    assert not any(message.startswith(folder) for message in caplog.messages)


def test_the_flag_reaches_every_model(monkeypatch, tmp_path):
    """Actor, reference, critic and reward model."""
    seen = []

    def noted(*args, **options):
        seen.extend(one.attention for one in (*args, *options.values()) if isinstance(one, Opening))
        return SimpleNamespace(config=None)

    for name in ("load_causal_lm", "load_scalar"):
        replace_in_builders(monkeypatch, name, noted)
    others = "PolicyModel ScalarModel frozen_engine train_engine end_token_id RewardModelScores choose_trained"
    others += " lora_config own_end_ids own_reward_tokenizer seed_new_rows warn_of_reward_loss _rollout_engine"
    for name in others.split():
        replace_in_builders(monkeypatch, name, lambda *_, **__: None)
    overrides = {"reward_function": None, "reward_model_name_or_path": "unused", "attn_implementation": "eager"}
    config = ppo_config(tmp_path, **overrides)
    build_ppo_models(config, config.plan_batches(1), SimpleNamespace(), 20)
    assert seen == ["eager"] * 4


def normed(x, weight):
    """Gemma's norm: the weight is what is added to 1."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def rotated(x):
    """Positions as angles between the first and the second half of each head's numbers; (H, T, D)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]), 10_000.0 ** (-torch.arange(half) / half))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def gemma2_states(model, ids, cap):
    """The last states (T, hidden) of a Gemma-2 of one row, written out; both layers, the first with a window."""
    config, width = model.config, model.config.head_dim
    x = model.model.embed_tokens.weight[ids] * math.sqrt(config.hidden_size)
    places = torch.arange(len(ids))
    distance = places[:, None] - places[None]
    for number, layer in enumerate(model.model.layers):
        y = normed(x, layer.input_layernorm.weight)
        query, key, value = (
            (y @ part.weight.T).view(len(ids), -1, width).transpose(0, 1)
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        logits = rotated(query) @ rotated(key).transpose(1, 2) / math.sqrt(config.query_pre_attn_scalar)
        logits = cap * torch.tanh(logits / cap) if cap else logits
        hidden = distance < 0
        if number % 2 == 0:
            hidden = hidden | (distance >= config.sliding_window)
        mixed = logits.masked_fill(hidden, -math.inf).softmax(-1) @ value
        mixed = mixed.transpose(0, 1).reshape(len(ids), -1) @ layer.self_attn.o_proj.weight.T
        x = x + normed(mixed, layer.post_attention_layernorm.weight)
        y = normed(x, layer.pre_feedforward_layernorm.weight)
        gate = F.gelu(y @ layer.mlp.gate_proj.weight.T, approximate="tanh")
        y = (gate * (y @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
        x = x + normed(y, layer.post_feedforward_layernorm.weight)
    return normed(x, model.model.norm.weight)


@torch.no_grad()
def test_the_cap_of_gemma_2_is_kept_and_the_change_said_once(tokenizer, tmp_path, caplog):
    say_what_is_used.cache_clear()
    lm = make_causal_lm("gemma2", attn_logit_softcapping=CAP)
    folder = save_folder(tmp_path, lm, tokenizer)
    with caplog.at_level(logging.WARNING):
        models = [load_causal_lm(folder, "--m", torch.float32, tokenizer) for _ in range(2)]
    message = f"{folder}: attention is computed by eager, not by sdpa, which does not do what this model needs"
    assert caplog.messages == [message]
    ids = torch.tensor([1, *range(5, 25)])
    expected = gemma2_states(lm, ids, CAP)
    for model in models:
        assert_near(model.model(ids[None]).last_hidden_state[0], expected)
    assert float((expected - gemma2_states(lm, ids, None)).abs().max()) > 0.1


@torch.no_grad()
def test_a_cap_in_a_family_that_has_sdpa_is_kept_too(tokenizer, tmp_path):
    """Gemma-3 may have one; transformers would stop at the first forward pass."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 100}
    config = Gemma3TextConfig(**sizes, **ids, num_key_value_heads=1, head_dim=16, attn_logit_softcapping=CAP)
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model = load_causal_lm(save_folder(tmp_path, lm, tokenizer), "--m", torch.float32, tokenizer)
    tokens = torch.tensor([[1, *range(5, 25)]])
    assert model.config._attn_implementation == "eager"
    assert_near(model(tokens).logits, lm(tokens).logits)
