# SPDX-License-Identifier: Apache-2.0
"""A folder with an adapter and no whole model opens wherever a model does: its base with the adapter merged in."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from adapter_cases import (
    HEADS,
    LORA_SETTINGS,
    MERGED,
    add_filled_lora,
    merged_by_peft,
    write_head_adapter,
    write_users_adapter,
)
from closeness import assert_near, near
from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.models.adapters import adapter_alone, base_of
from dschat.models.classifiers import load_classifier, load_scalar, load_trained_scalar
from dschat.models.load import load_causal_lm
from dschat.models.lora import add_lora
from dschat.models.pretrained import open_config
from dschat.models.reward_notes import note_end_token, noted_end_token
from dschat.models.save import save_model
from dschat.models.scalar import note_reward_loss
from dschat.models.tokenizer import load_tokenizer
from dschat.scoring.reward_reader import load_reward_model
from dschat.scoring.source import ResponseTexts
from factories import hf_score, largest_difference, make_causal_lm, save_folder, saved_weights

IDS = torch.tensor([[5, 9, 12, 7, 30, 8]])


def save_both(folder, model, base, tokenizer, seed=0):
    """An adapter of random numbers, alone in folder/alone, and merged in folder/merged; the path of the first."""
    add_filled_lora(model, 2, base, seed=seed)
    for name, merge in (("alone", False), ("merged", True)):
        save_model(model, saved_weights(model), tokenizer, folder / name, merge)
    return str(folder / "alone")


@pytest.fixture
def base(tokenizer, tmp_path):
    return save_folder(tmp_path / "base", make_causal_lm(), tokenizer)


@pytest.fixture
def policy(base, tokenizer, tmp_path):
    """A causal LM's adapter."""
    model = load_causal_lm(base, "--m", torch.float32, tokenizer, end_id=7)
    return save_both(tmp_path / "policy", model, base, tokenizer)


@pytest.fixture
def reward(base, tokenizer, tmp_path):
    """A reward model's adapter, with its head."""
    model = load_scalar(base, "--m", torch.float32, tokenizer)
    return save_both(tmp_path / "reward", model, base, tokenizer, seed=1)


def same(first, second):
    return largest_difference(first.state_dict(), second.state_dict()) == 0


def test_a_policy_s_adapter_is_the_merged_model_to_the_bit(policy, base, tokenizer, tmp_path):
    model = load_causal_lm(policy, "--m", torch.float32, tokenizer)
    assert same(model, load_causal_lm(str(tmp_path / "policy" / "merged"), "--m", torch.float32, tokenizer))
    assert not same(model, load_causal_lm(base, "--m", torch.float32, tokenizer))
    assert not any("lora" in name for name in model.state_dict()) and model.name_or_path == policy
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_trained_reward_model_brings_its_head_and_is_called_by_its_own_name(
    reward, base, tokenizer, tmp_path, caplog
):
    caplog.set_level("INFO")
    for load in (load_scalar, load_trained_scalar):
        model = load(reward, "--m", torch.float32, tokenizer)
        assert same(model, load_scalar(str(tmp_path / "reward" / "merged"), "--m", torch.float32, tokenizer))
    assert model.score.weight.any() and "new score head" not in caplog.text
    assert f"--m {reward}: a LoRA adapter, which is merged into {base}" in caplog.text
    classifier = load_classifier(f"{reward}/adapter", "--m", torch.float32, tokenizer)
    assert same(classifier, model)
    reader = load_reward_model(reward, tokenizer, False, torch.device("cpu"), torch.float32)
    texts = ResponseTexts(["the quick"], [" fox"], [Row("the quick", None, None, None, {}, "one")], [True])
    ids = [*tokenizer.encode("the quick"), *tokenizer.encode(" fox", add_special_tokens=False), 2]
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward" / "merged", dtype=torch.float32)
    assert float(reader(texts)) == near(hf_score(whole.eval(), ids))


def test_a_policy_s_adapter_is_a_start_of_step_2_but_no_reward_model(policy, reward, tokenizer, tmp_path, caplog):
    caplog.set_level("INFO")
    model = load_scalar(policy, "--m", torch.float32, tokenizer)
    merged = load_scalar(str(tmp_path / "policy" / "merged"), "--m", torch.float32, tokenizer)
    assert same(model, merged) and not model.score.weight.any()
    assert f"--m {policy}: a new score head" in caplog.text
    for load in (load_trained_scalar, load_classifier):
        with pytest.raises(UserError, match=f"--m {policy}: not a reward model, it has no score head"):
            load(policy, "--m", torch.float32, tokenizer)
    with pytest.raises(UserError, match=f"--m {reward}: the adapter of a reward model or critic"):
        load_causal_lm(reward, "--m", torch.float32, tokenizer)


def test_an_adapter_may_lie_on_an_adapter(policy, tokenizer, tmp_path):
    """As step 1 and step 2 leave it, both with --no_merge_lora."""
    start = load_scalar(policy, "--m", torch.float32, tokenizer)
    path = save_both(tmp_path / "second", start, policy, tokenizer, seed=2)
    assert base_of(path, "--m") == (str(tmp_path / "base"), [adapter_alone(policy), adapter_alone(path)])
    found = load_trained_scalar(path, "--m", torch.float32, tokenizer)
    assert same(found, load_scalar(str(tmp_path / "second" / "merged"), "--m", torch.float32, tokenizer))
    assert open_config(path, "--m").model_type == "gemma" and load_tokenizer(path, "--m").eos_token_id == 2


def test_an_adapter_alone_keeps_what_step_2_noted(base, tokenizer, tmp_path):
    """Whatever path names it, and also if it lies on the adapter of another reward model; the base says nothing."""
    model = load_scalar(base, "--m", torch.float32, tokenizer)
    note_reward_loss(model, "average")
    note_end_token(model, tokenizer, 7)
    first = save_both(tmp_path / "first", model, base, tokenizer)
    for path in (first, f"{first}/adapter", f"{tmp_path}/first/merged", f"{tmp_path}/first/merged/adapter"):
        config = open_config(path, "--m")
        assert noted_end_token(config) == tokenizer.convert_ids_to_tokens(7) and config.reward_loss == "average"
    assert noted_end_token(open_config(base, "--m")) is None
    start = load_scalar(first, "--m", torch.float32, tokenizer)
    note_end_token(start, tokenizer, 8)
    second = save_both(tmp_path / "second", start, first, tokenizer, seed=2)
    loaded = load_trained_scalar(second, "--m", torch.float32, tokenizer)
    assert noted_end_token(loaded.config) == tokenizer.convert_ids_to_tokens(8)
    (adapter_alone(second) / "adapter_notes.json").write_text("1")
    with pytest.raises(UserError, match="adapter_notes.json cannot be read: .* Copy the model again"):
        open_config(second, "--m")


def edit_settings(path, **changes):
    """Changes an adapter's config; None takes a setting away."""
    file = adapter_alone(path) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def forget_base(path):
    """Takes the hash of the base away, as in an adapter of another program."""
    (adapter_alone(path) / "adapter_notes.json").unlink()


@pytest.mark.parametrize("load", [load_causal_lm, open_config])
def test_another_model_at_the_base_s_path_is_refused(load, policy, base, tokenizer, tmp_path):
    """Also one of the same family and sizes, whose weights alone differ."""
    arguments = (torch.float32, tokenizer) if load is load_causal_lm else ()
    shutil.copytree(base, tmp_path / "first base")
    make_causal_lm(seed=9).save_pretrained(base)
    with pytest.raises(UserError, match=f"--m {policy}: .* trained on another model than the one that is in {base}"):
        load(policy, "--m", *arguments)
    edit_settings(policy, base_model_name_or_path=str(tmp_path / "first base"))
    load(policy, "--m", *arguments)


def test_a_base_on_the_hub_is_recorded_with_its_commit(base, tokenizer, tmp_path, monkeypatch):
    """A cache of the hub with two commits of a model; then a folder of the model's name where the command runs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    first_snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(base, first_snapshot)
    model = load_causal_lm("owner/name", "--m", torch.float32, tokenizer)
    path = save_both(tmp_path / "policy", model, "owner/name", tokenizer)
    assert json.loads((adapter_alone(path) / "adapter_config.json").read_text())["revision"] == "a" * 40
    merged = load_causal_lm(str(tmp_path / "policy" / "merged"), "--m", torch.float32, tokenizer)
    assert same(load_causal_lm(path, "--m", torch.float32, tokenizer), merged)
    save_folder(repository / "snapshots" / ("b" * 40), make_causal_lm(seed=9), tokenizer)
    (repository / "refs" / "main").write_text("b" * 40)
    with pytest.raises(UserError, match=f"the revision {'a' * 40} of owner/name, which is another one now"):
        load_causal_lm(path, "--m", torch.float32, tokenizer)
    save_folder(tmp_path / "owner" / "name", make_causal_lm(seed=9), tokenizer)
    with pytest.raises(UserError, match="the revision .* of owner/name, which is another one now"):
        load_causal_lm(path, "--m", torch.float32, tokenizer)
    edit_settings(path, base_model_name_or_path=str(first_snapshot), revision=None)
    assert same(load_causal_lm(path, "--m", torch.float32, tokenizer), merged)


def test_a_base_that_is_gone_is_named_with_its_adapter(policy, tokenizer, tmp_path):
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    words = f"--m {policy}: its LoRA adapter is for {tmp_path / 'base'}: no such folder. If the model has moved, set"
    with pytest.raises(UserError, match=words):
        load_causal_lm(policy, "--m", torch.float32, tokenizer)
    edit_settings(policy, base_model_name_or_path=str(moved))
    load_causal_lm(policy, "--m", torch.float32, tokenizer)
    forget_base(policy)
    edit_settings(policy, base_model_name_or_path=None)
    with pytest.raises(UserError, match=f"--m {policy}: .* does not say which model it is for"):
        load_causal_lm(policy, "--m", torch.float32, tokenizer)
    edit_settings(policy, base_model_name_or_path=policy)
    with pytest.raises(UserError, match="names its own folder"):
        load_causal_lm(policy, "--m", torch.float32, tokenizer)


def test_an_adapter_of_another_model_is_refused_by_the_layer_that_does_not_fit(policy, reward, tokenizer, tmp_path):
    for path in (policy, reward):
        forget_base(path)
    save_folder(tmp_path / "base", make_causal_lm("gpt2"), tokenizer)
    with pytest.raises(UserError, match=f"--m {policy}: the adapter .* does not fit .*which has no model.layers"):
        load_causal_lm(policy, "--m", torch.float32, tokenizer)
    save_folder(tmp_path / "base", make_causal_lm(hidden_size=64), tokenizer)
    for path, load in ((policy, load_causal_lm), (reward, load_scalar)):
        with pytest.raises(UserError, match=f"--m {path}: the adapter .* does not fit the base .* of that size"):
            load(path, "--m", torch.float32, tokenizer)


@pytest.mark.parametrize("kind", ["gemma", "gpt2"])
@pytest.mark.parametrize("settings", LORA_SETTINGS)
def test_an_adapter_of_peft_s_is_merged_as_peft_merges_it(settings, kind, tokenizer, tmp_path):
    _, folder, expected = merged_by_peft(tmp_path, kind, settings, tokenizer)
    model = load_trained_scalar(str(folder), "--m", torch.float32, tokenizer)
    assert largest_difference(model.state_dict(), expected) < MERGED


@pytest.mark.parametrize(("name", "value"), [("use_dora", True), ("init_lora_weights", "pissa")])
def test_an_adapter_that_is_more_than_lora_is_refused_by_name(name, value, tokenizer, tmp_path):
    base = save_folder(tmp_path / "base", make_causal_lm(), tokenizer)
    folder = write_users_adapter(tmp_path / "adapter", base, **{name: value})
    with pytest.raises(UserError, match=f"--m {folder}: .*adapter_config.json sets {name}\\. .*merge_and_unload"):
        load_scalar(str(folder), "--m", torch.float32, tokenizer)


EXPERTS = {"intermediate_size": 32, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def mixture(kind, **settings):
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, **sizes, num_key_value_heads=4, **EXPERTS, **settings)
    return AutoModelForCausalLM.from_config(config)


def test_an_adapter_of_a_mixture_of_experts_opens_again(tokenizer, tmp_path):
    """peft says of these families that no parameter was targeted, which is plain LoRA all the same."""
    base = save_folder(tmp_path / "base", mixture("qwen3_moe", num_experts=4, head_dim=8), tokenizer)
    model = load_causal_lm(base, "--m", torch.float32, tokenizer)
    add_lora(model, 2, ["q_proj"], base)
    save_model(model, saved_weights(model), tokenizer, tmp_path / "alone", False)
    load_causal_lm(str(tmp_path / "alone"), "--m", torch.float32, tokenizer)
    config = json.loads((tmp_path / "alone" / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] is None


def test_adapters_of_experts_are_refused_before_the_training():
    """peft adapts the experts of some families wherever a name of their dense layers is among the targets."""
    model = mixture("deepseek_v2", n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1, **LATENT)
    with pytest.raises(UserError, match="--lora_dim: adapters of the experts of base could not be saved"):
        add_lora(model, 2, None, "base")


def test_embeddings_that_peft_saved_with_an_adapter_take_the_base_s_places(tokenizer, tmp_path):
    """As of a run that added tokens: the base has 95 rows, the adapter brings all 100."""
    base = save_folder(tmp_path / "base", make_causal_lm("llama", vocab_size=95), tokenizer)
    folder = write_users_adapter(tmp_path / "adapter", base)
    weights = load_file(folder / "adapter_model.safetensors")
    rows = torch.randn(100, 32)
    weights["base_model.model.model.embed_tokens.weight"] = rows
    save_file(weights, folder / "adapter_model.safetensors")
    model = load_scalar(str(folder), "--m", torch.float32, tokenizer)
    assert torch.equal(model.get_input_embeddings().weight, rows)


@pytest.mark.parametrize("case", HEADS)
def test_an_adapter_of_a_tied_head_is_merged_as_peft_computes_it(case, tokenizer, tmp_path):
    """Head and embeddings are one weight in the base, and differ under the adapter."""
    base = save_folder(tmp_path / "base", make_causal_lm("llama", tie_word_embeddings=True), tokenizer)
    folder = write_head_adapter(tmp_path / "adapter", base, *HEADS[case])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(plain, folder).eval()(IDS).logits
        model = load_causal_lm(str(folder), "--m", torch.float32, tokenizer)
        assert_near(model(IDS).logits, expected)
        save_model(model, saved_weights(model), tokenizer, tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert not again.config.tie_word_embeddings


# -- GGUF
@pytest.mark.parametrize("place", ["folder", "file", "hub"])
def test_gguf_weights_are_called_so_with_a_remedy(place, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    path = {"folder": str(tmp_path), "file": str(tmp_path / "model.Q4_1.gguf"), "hub": "somebody/model-GGUF"}[place]
    with pytest.raises(UserError, match=f"--m {path}: GGUF weights, .* Give the original model"):
        load_causal_lm(path, "--m", torch.float32, tokenizer)
