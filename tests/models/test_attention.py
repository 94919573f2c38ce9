# SPDX-License-Identifier: Apache-2.0
"""How attention is computed: flags that cannot work, and the cap of Gemma-2."""

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import LlavaConfig

from closeness import assert_near
from dschat.base.errors import UserError
from dschat.models.attention import check_attention, explain_refusal, use_attention, warn_once_if_other_attention
from dschat.models.classifiers import load_scalar
from dschat.models.load import load_causal_lm
from dschat.models.opening import LoadOptions
from dschat.training.steps.engines import RunPlan
from dschat.training.steps.ppo import build_ppo_models
from factories import make_causal_lm, ppo_config, replace_in_builders, save_folder

CAP = 0.7


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/vllm-flash-attn3"])
def test_flash_attention_needs_half_precision(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # all is asked before one is used
    with pytest.raises(UserError, match=f"{name} computes in half precision only: give --dtype bf16"):
        check_attention(name, torch.float32)
    check_attention("sdpa", torch.float32)


def test_a_family_without_flash_attention_is_named():
    error = ValueError("BloomForCausalLM does not support Flash Attention 2 yet.\nAnd more.")
    message = explain_refusal("flash_attention_2", "./bloom", "./bloom", error)
    assert message is not None and message.startswith("--attn_implementation flash_attention_2: ./bloom cannot")
    assert "Flash Attention 2 yet. Use --attn_implementation sdpa." in message
    unended = explain_refusal("flash_attention_2", "./bloom", "./bloom", ImportError("`kernels` is missing"))
    assert unended is not None and "`kernels` is missing. Use --attn_implementation sdpa." in unended
    assert explain_refusal("flash_attention_2", "./bloom", "./bloom", ValueError("no such file")) is None
    assert (
        explain_refusal("flash_attention_2", "./flash", "./flash", OSError("./flash has no file config.json")) is None
    )
    unknown = ValueError("Unrecognized model in org/Flash-7B.\nKnown are BloomConfig, FlexOlmoConfig.")
    assert explain_refusal("flash_attention_2", "./adapter", "org/Flash-7B", unknown) is None
    assert explain_refusal("flash_attention_2", "a", "a", error) is not None, "a name that stands in other words"
    assert explain_refusal("sdpa", "./bloom", "./bloom", error) is None


def test_each_part_of_a_model_has_its_own_attention_again():
    """Text by sdpa, images by eager, as its builder chose."""
    config = LlavaConfig()
    config._attn_implementation = {"": "sdpa", "text_config": "sdpa", "vision_config": "eager"}
    with use_attention("one_token", config):
        assert config.text_config._attn_implementation == config._attn_implementation == "one_token"
    assert config.text_config._attn_implementation == config._attn_implementation == "sdpa"
    assert config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("open_model", "wanted", "used"), [(load_causal_lm, "auto", "sdpa"), (load_scalar, "eager", "eager")]
)
def test_models_are_opened_as_the_flag_says(open_model, wanted, used, tokenizer, tmp_path, caplog):
    folder = save_folder(tmp_path, make_causal_lm("gemma"), tokenizer)
    model = open_model(folder, "--m", torch.float32, tokenizer, load_options=LoadOptions(attention=wanted))
    assert model.config._attn_implementation == used
    assert not any(message.startswith(folder) for message in caplog.messages)


def test_the_flag_reaches_every_model(monkeypatch, tmp_path):
    """Actor, reference, critic and reward model."""
    seen = []

    def noted(*args, **options):
        seen.extend(one.attention for one in (*args, *options.values()) if isinstance(one, LoadOptions))
        return SimpleNamespace(config=None)

    for name in ("load_causal_lm", "load_critic", "load_trained_scalar"):
        replace_in_builders(monkeypatch, name, noted)
    others = "PolicyModel ScalarModel frozen_engine train_engine end_token_id RewardModelScores choose_trained"
    others += " lora_config own_end_ids own_reward_tokenizer seed_new_rows warn_of_reward_loss"
    others += " require_savable _rollout_engine"
    for name in others.split():
        replace_in_builders(monkeypatch, name, lambda *_, **__: None)
    overrides = {"reward_function": None, "reward_model_name_or_path": "unused", "attn_implementation": "eager"}
    config = ppo_config(tmp_path, **overrides)
    build_ppo_models(config, RunPlan.of(config, config.plan_batches(1), 20), SimpleNamespace())
    assert seen == ["eager"] * 4


def test_the_cap_of_gemma_2_is_kept_and_the_change_said_once(tokenizer, tmp_path, caplog):
    warn_once_if_other_attention.cache_clear()
    lm = make_causal_lm("gemma2", attn_logit_softcapping=CAP)
    folder = save_folder(tmp_path, lm, tokenizer)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            load_causal_lm(folder, "--m", torch.float32, tokenizer)
        automatic = load_causal_lm(folder, "--m", torch.float32, tokenizer, load_options=LoadOptions(attention="auto"))
    message = f"{folder}: attention is computed by eager, not by sdpa, which does not do what this model needs"
    assert caplog.messages == [message]
    assert automatic.config._attn_implementation == "eager"


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
