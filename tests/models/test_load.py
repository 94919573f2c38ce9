# SPDX-License-Identifier: Apache-2.0
"""Opening models: what does not exist, what does not fit, missing weights, grown embeddings, generation configs."""

import errno
import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from closeness import assert_near
from dschat.base.errors import UserError
from dschat.models.classifiers import load_classifier, load_critic, load_scalar, load_trained_scalar
from dschat.models.finetuning import enable_gradient_checkpointing
from dschat.models.load import load_causal_lm, require_savable, warn_without_classifier
from dschat.models.open_errors import explain_missing
from dschat.models.pretrained import ModelSource, check_loaded
from dschat.models.reward_head import draw_head
from dschat.models.save import save_model
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import load_tokenizer
from factories import (
    make_causal_lm,
    make_classifier,
    make_config,
    make_tokenizer,
    pad_rows,
    ragged_rows,
    save_folder,
    saved_weights,
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IDS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_CLASSIFIER = {
    "granite": transformers.GraniteConfig(**SIZES, **IDS, embedding_multiplier=3.0, logits_scaling=4.0),
    "cohere": transformers.CohereConfig(**SIZES, **IDS),
}
EXPERTS = SIZES | IDS | {"num_key_value_heads": 1, "initializer_range": 0.2, "num_experts_per_tok": 2}
NOISE = {"num_local_experts": 4, "router_jitter_noise": 0.2, "head_dim": 16}
OPT = SIZES | IDS | {"word_embed_proj_dim": 32, "ffn_dim": 32, "max_position_embeddings": 128, "init_std": 0.2}
# Random in training mode: noise of routers, PhiMoE's draws of experts, dropout in a config or in one inside it, and
# layers that are left out.
RANDOM = {
    "phimoe": transformers.PhimoeConfig(**EXPERTS),
    "mixtral": transformers.MixtralConfig(**EXPERTS, **NOISE),
    "opt": transformers.OPTConfig(**OPT, layerdrop=0.5),
    "gpt2": make_config("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
}


def test_a_step_that_has_not_written_its_folder_is_suspected(tmp_path, monkeypatch):
    """`mine/sft` may be a name on the hub; where a folder `mine` is there, it is more likely a step's output."""
    monkeypatch.chdir(tmp_path)
    flag = "--model_name_or_path"
    assert "could not be fetched" in explain_missing("model", "mine/sft", flag, OSError("offline"))
    (tmp_path / "mine").mkdir()
    message = explain_missing("model", "mine/sft", flag, OSError("offline"))
    assert explain_missing("model", "./nowhere", flag, OSError()).startswith(f"{flag} ./nowhere: no such folder")
    assert message.startswith(f"{flag} mine/sft: no such folder, though mine/ is there. If a step shall write it, has")
    assert message.endswith("no such model either: offline")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "64"}, "error for field 'hidden_size': .*expected int, got str .value: '64'"),
        ({"dtype": "float33"}, "no attribute 'float33'"),
        # What only the model refuses.
        ({"pad_token_id": 999}, "Padding_idx must be within num_embeddings"),
        ({"num_key_value_heads": 0}, "by zero"),
    ],
)
def test_a_config_with_a_bad_value_is_named(change, words, tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(
        UserError, match=f"--m {folder}: this folder holds no model that transformers can open: .*{words}"
    ):
        load_causal_lm(folder, "--m", torch.float32, tokenizer)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(),
        MemoryError(),
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
    ],
)
def test_an_error_of_the_machine_is_no_fault_of_the_folder(error, tokenizer, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise error

    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(type(error)) as raised:
        load_causal_lm(folder, "--m", torch.float32, tokenizer)
    assert raised.value is error


def test_weights_of_other_shapes_are_named_with_both(tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)
    source = ModelSource.of(folder, "--m")
    loading = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": {("score.weight", (3, 8), (1, 8))}}
    with pytest.raises(
        UserError, match=r"score.weight has \[3, 8\] instead of \[1, 8\]. A reward model must have one"
    ):
        check_loaded(source, loading)
    loading["mismatched_keys"] = {("norm.weight", (3,), (1,)), ("score.weight", (1, 8), (1, 4))}
    with pytest.raises(UserError, match=r"norm.weight has \[3\] instead of \[1\], .* Is the config.json"):
        check_loaded(source, loading)


def test_embeddings_grow_by_an_added_pad(tmp_path):
    base = save_folder(tmp_path, make_causal_lm(vocab_size=100), make_tokenizer(pad_token=None))
    tokenizer = load_tokenizer(base, "--m")
    tokenizer.add_special_tokens({"pad_token": "<fill>"})
    assert len(tokenizer) == 101 and tokenizer.pad_token_id == 100
    for load in (load_scalar, load_causal_lm):
        model = load(base, "--m", torch.float32, tokenizer)
        assert model.get_input_embeddings().num_embeddings == 101
        assert model.config.pad_token_id == 100


def test_a_checkpoint_with_a_generation_config_that_transformers_refuses_to_save_is_saved_at_the_end(
    tokenizer, tmp_path
):
    """As published with Llama-2 and others: sampling parameters without do_sample."""
    folder = save_folder(tmp_path / "base", make_causal_lm(), tokenizer)
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))
    model = load_causal_lm(folder, "--m", torch.float32, tokenizer)
    save_model(model, saved_weights(model), tokenizer, tmp_path / "trained")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")


def test_a_generation_config_that_could_not_be_saved_is_refused_before_the_training(tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_causal_lm(), tokenizer)
    (tmp_path / "generation_config.json").write_text(json.dumps({"num_beams": 1, "early_stopping": True}))
    message = f"--m {folder}: transformers would not save its generation_config.json .*`early_stopping`"
    model = load_causal_lm(folder, "--m", torch.float32, tokenizer)  # to generate, for instance
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        require_savable(model, f"--m {folder}")


# -- weights that a folder lacks, and those that it has no place for


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar])
def test_a_folder_without_a_layer_is_refused(load, tokenizer, tmp_path):
    """As a copy leaves it that has lost one of several files; transformers alone would fill in random numbers.

    A classifier of a causal LM may lack the score head alone.
    """
    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)
    weights = load_file(tmp_path / "model.safetensors")
    lost = sorted(name for name in weights if "layers.1." in name)
    kept = {name: weight for name, weight in weights.items() if name not in lost}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert len(lost) == 9  # four of attention, three of the MLP, two norms
    with pytest.raises(UserError) as caught:
        load(folder, "--m", torch.float32, tokenizer)
    message = str(caught.value)
    assert f"--m {folder}: 9 of the model's weights are not in the folder: {', '.join(lost[:8])}, …" in message
    assert "saved or copied in part" in message


@pytest.mark.parametrize(("kind", "tied"), [("gemma", True), ("gpt2", False)])
def test_a_reward_model_given_as_sft_model_is_refused(tied, kind, tokenizer, tmp_path):
    """Also where the embedding is the output layer, so that none of a causal LM's weights is missing."""
    model = make_classifier(kind, tie_word_embeddings=tied)
    folder = save_folder(tmp_path, model, tokenizer)
    message = f"--m {folder}: a {type(model).__name__} is a reward model or critic, which gives scores"
    with pytest.raises(UserError, match=re.escape(message)):
        load_causal_lm(folder, "--m", torch.float32, tokenizer)


@pytest.mark.parametrize("tied", [True, False])
def test_a_causal_lm_given_as_reward_model_is_refused(tied, tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_causal_lm("llama", tie_word_embeddings=tied), tokenizer)
    for load in (load_trained_scalar, load_classifier):
        with pytest.raises(UserError, match="--m .*: not a reward model, it has no score head. Train one from it"):
            load(folder, "--m", torch.float32, tokenizer)
    load_scalar(folder, "--m", torch.float32, tokenizer)  # a critic may start from it


def test_a_vocabulary_that_does_not_fit_the_tokenizer(tokenizer, tmp_path, caplog):
    """97 rows for 100 tokens; once, although actor and reference are the same folder. 99 want a pad token alone."""
    folders = {n: save_folder(tmp_path / str(n), make_causal_lm(vocab_size=n), tokenizer) for n in (97, 99, 128)}
    for folder in folders.values():
        for load in (load_causal_lm, load_causal_lm, load_scalar):
            assert load(folder, "--m", torch.float32, tokenizer).get_input_embeddings().num_embeddings >= 100
    (message,) = [message for message in caplog.messages if "embeddings of" in message]
    assert message.startswith(f"--m {folders[97]}: the model has embeddings of 97 tokens, its tokenizer knows 100: 3")
    assert "give it its own" in message


def test_weights_without_a_place_are_named(tokenizer, tmp_path, caplog):
    folder = save_folder(tmp_path, make_causal_lm("gemma"), tokenizer)
    weights = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.{i}.mlp.odd.weight": torch.zeros(2) for i in range(9)}
    save_file(weights | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_causal_lm(folder, "--m", torch.float32, tokenizer)
    named = ", ".join(list(extra)[:8])
    assert f"--m {folder}: 9 weights of the folder are not used: {named}, …" in caplog.messages


def test_a_model_that_reads_in_both_directions_is_no_policy(tokenizer, tmp_path):
    """It opens as a causal LM in transformers, which says nothing."""
    folder = save_random(transformers.BertConfig(**SIZES, vocab_size=100), tmp_path, tokenizer)
    message = f"--m {folder}: a bert model is not a causal LM, it reads in both directions. Use a decoder-only model"
    with pytest.raises(UserError, match=f"^{message}"):
        load_causal_lm(folder, "--m", torch.float32, tokenizer)


# -- families of which transformers knows no sequence classifier


def save_random(config, folder, tokenizer):
    """A random causal LM of a configuration as a folder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return save_folder(folder, transformers.AutoModelForCausalLM.from_config(config), tokenizer)


def test_step_1_says_that_step_2_will_not_work_and_step_2_does_not(tokenizer, tmp_path, caplog):
    folder = save_random(NO_CLASSIFIER["granite"], tmp_path / "granite", tokenizer)
    warn_without_classifier(folder)
    (message,) = caplog.messages
    assert "no sequence classifier of the family granite" in message and "--reward_function" in message
    with pytest.raises(UserError, match="no sequence classifier of the family granite.*--reward_function"):
        load_scalar(folder, "--m", torch.float32, tokenizer)
    caplog.clear()
    warn_without_classifier(save_folder(tmp_path / "llama", make_causal_lm("llama"), tokenizer))
    assert not caplog.messages


@pytest.mark.parametrize("kind", NO_CLASSIFIER)
def test_a_critic_of_a_family_without_classifiers(kind, tokenizer, tmp_path):
    """Its numbers are the last states, by plain transformers, through the head; it opens again."""
    folder = save_random(NO_CLASSIFIER[kind], tmp_path / "sft", tokenizer)
    model = load_critic(folder, "--critic", torch.float32, tokenizer)
    ids, attention_mask, _ = pad_rows(ragged_rows([2, 5], [7, 3]), left=2, right=1)
    torch.nn.init.normal_(model.score.weight, std=0.1)  # as if trained
    save_model(model, saved_weights(model), tokenizer, tmp_path / "critic")
    again = load_critic(str(tmp_path / "critic"), "--m", torch.float32, tokenizer)
    backbone = transformers.AutoModel.from_pretrained(tmp_path / "critic").eval()
    with torch.no_grad():
        values = ScalarModel(again).eval()(ids, attention_mask)
        for row, mask, own in zip(ids, attention_mask, values, strict=True):
            expected = backbone(row[mask][None]).last_hidden_state[0] @ model.score.weight[0]
            assert_near(own[mask], expected)


def gradients_of(model, ids):
    """Of the logits' squares, by name."""
    model.zero_grad()
    model(ids, use_cache=False).logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", RANDOM)
def test_an_opened_model_computes_in_training_mode_as_in_evaluation_mode(family, tokenizer, tmp_path):
    """And in that as the saved model does, whose config is kept; its own training mode gives other numbers."""
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(RANDOM[family]).eval()
    model = load_causal_lm(save_folder(tmp_path, plain, tokenizer), "--m", torch.float32, tokenizer)
    ids = torch.randint(3, 100, (8, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain(ids).logits
        assert float((plain.train()(ids).logits - expected).abs().max()) > 0.1, "the test has nothing to find"
        assert torch.equal(model.eval()(ids).logits, expected)
        assert torch.equal(model.train()(ids).logits, expected)
    before = gradients_of(model.eval(), ids)
    assert any("router" in name or "gate" in name for name in before) or family in ("opt", "gpt2")
    enable_gradient_checkpointing(model)
    after = gradients_of(model.train(), ids)
    assert before.keys() == after.keys()
    for name, gradient in before.items():
        assert_near(after[name], gradient, scale=0.01)
    assert getattr(model.config, "router_jitter_noise", None) == getattr(plain.config, "router_jitter_noise", None)


def test_a_new_reward_head_has_the_published_variance():
    """N(0, 1 / (H + 1)): over 65,536 weights, mean square and mean deviate by no more than 5 standard errors."""
    width = 65_536
    head = torch.nn.Linear(width, 1)
    draw_head(head, 7)
    assert float(head.weight.square().mean()) * (width + 1) == pytest.approx(1, abs=5 * (2 / width) ** 0.5)
    assert abs(float(head.weight.mean())) < 5 / width
    assert not bool(head.bias.any())


def test_the_seed_alone_decides_a_new_reward_head(tokenizer, tmp_path):
    folder = save_folder(tmp_path, make_causal_lm("llama"), tokenizer)

    def head(seed, dtype=torch.float32):
        torch.manual_seed(torch.seed())
        return load_scalar(folder, "--m", dtype, tokenizer, head_seed=seed).score.weight.detach()

    first = head(1)
    assert torch.equal(first, head(1)) and torch.equal(first.bfloat16(), head(1, torch.bfloat16))
    assert not torch.equal(first, head(2)) and bool(first.all())


def test_a_folder_whose_run_has_not_finished_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    message = explain_missing("model", str(tmp_path), "--model_name_or_path", OSError("no config"))
    assert "has not finished" in message and "--resume_from_checkpoint" in message
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "config.json").write_text("{}")
    message = explain_missing("model", str(tmp_path), "--model_name_or_path", OSError("no config"))
    assert message.endswith(f"Did you mean {tmp_path / 'actor'}?")
