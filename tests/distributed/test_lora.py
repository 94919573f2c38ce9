# SPDX-License-Identifier: Apache-2.0
"""LoRA: what trains, the reference without a second model, and what is saved; on one process and on two at ZeRO 3."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from closeness import UPDATE, assert_near, assert_weights_near, near
from dschat.engine.adapters_off import AdaptersOff
from dschat.models.adapters import lora_config
from dschat.models.classifiers import load_scalar
from dschat.models.lora import add_lora
from dschat.models.policy import PolicyModel
from dschat.models.save import save_model
from dschat.settings.ppo import PPOConfig
from dschat.training.steps.engines import RunPlan
from dschat.training.steps.ppo import build_ppo_models
from factories import (
    engine_of,
    hf_logprobs,
    hf_score,
    make_causal_lm,
    make_classifier,
    make_tokenizer,
    pad_rows,
    save_folder,
    saved_weights,
)
from recorded_updates import Case
from sharded_checks import ROWS, lora_updates

MODELS = {"policy": make_causal_lm, "reward model": make_classifier}
OPENERS = {"policy": AutoModelForCausalLM, "reward model": AutoModelForSequenceClassification}


def fill(model):
    """Random numbers in all that trains: adapters, whose second matrices are zero in new ones, and the score head."""
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        if p.requires_grad:
            p.data = 0.2 * torch.randn(p.shape, generator=generator)


def adapted(make, kind):
    """A model with filled adapters."""
    model = make(kind)
    add_lora(model, 4, None, "base")
    fill(model)
    return model


def logprobs_of(model):
    ids, attention_mask, mask = pad_rows(ROWS)
    return model(ids, attention_mask, mask.shape[1])[0]


def numbers_of(model):
    """A number for every row, by transformers alone."""
    with torch.no_grad():
        if hasattr(model, "score") or hasattr(getattr(model, "base_model", None), "score"):
            return torch.tensor([hf_score(model, p + r) for p, r in ROWS])
        return torch.cat([hf_logprobs(model, row)[0] for row in ROWS])


@pytest.mark.parametrize("kind", ["gemma", "gpt2"])
@pytest.mark.parametrize("role", MODELS)
def test_only_adapters_and_the_score_head_get_gradients(role, kind):
    model = adapted(MODELS[role], kind)
    numbers = model(input_ids=torch.tensor([ROWS[0][0] + ROWS[0][1]])).logits
    numbers.square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    kinds = {name.split(".lora_")[-1][0] if ".lora_" in name else name for name in trained}
    assert kinds == ({"A", "B"} if role == "policy" else {"A", "B", "score.weight"})
    assert all(bool(model.get_parameter(name).grad.any()) for name in trained)


def test_the_reference_is_exactly_the_base_model(group):
    engine = engine_of(adapted(make_causal_lm, "gpt2"))
    engine.eval()  # a GPT-2 made in code has dropout; loaded ones have none
    reference = AdaptersOff(engine)
    with torch.no_grad():
        base = logprobs_of(PolicyModel(make_causal_lm("gpt2")))
        assert torch.equal(logprobs_of(reference), base)
        assert float((logprobs_of(engine) - base).abs().max()) > 0.01
    assert not logprobs_of(reference).requires_grad


def score(prompts, responses, rows):
    raise AssertionError("nothing is scored")


def test_the_reference_holds_no_second_model(group, tmp_path):
    base = save_folder(tmp_path / "base", make_causal_lm(), make_tokenizer())
    config = PPOConfig(
        data_path=["unused"],
        output_dir=str(tmp_path / "out"),
        actor_model_name_or_path=base,
        reward_function=[f"{__file__}:score"],
        per_device_generation_batch_size=8,
        per_device_training_batch_size=8,
        actor_lora_dim=4,
        dtype="fp32",
    )
    models = build_ppo_models(config, RunPlan.of(config, config.plan_batches(1), 10), make_tokenizer())
    actor, reference = (
        {name: p.data_ptr() for name, p in engine.module.named_parameters()}
        for engine in (models.actor, models.reference)
    )
    assert actor == reference
    total = sum(p.numel() for p in models.actor.module.parameters())
    adapters = sum(p.numel() for name, p in models.actor.module.named_parameters() if "lora_" in name)
    assert total - adapters == sum(p.numel() for p in make_causal_lm().parameters())


@pytest.mark.parametrize("role, kind", [("policy", "gemma"), ("reward model", "gpt2")])
def test_saved_models_say_what_the_live_model_says(role, kind, tmp_path):
    """Merged, and as an adapter: AutoPeftModel… finds the base by its path, a causal LM, and the score head beside."""
    is_policy = role == "policy"
    base = save_folder(tmp_path / "base", make_causal_lm(kind), make_tokenizer())
    model = make_causal_lm(kind) if is_policy else load_scalar(base, "", torch.float32, make_tokenizer())
    add_lora(model, 4, None, base)
    fill(model)
    expected = numbers_of(model.eval())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_model(model, saved_weights(model), make_tokenizer(), tmp_path / "merged")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    merged = OPENERS[role].from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not any("lora" in name for name in merged.state_dict())
    assert_near(numbers_of(merged), expected, UPDATE)
    save_model(model, saved_weights(model), make_tokenizer(), tmp_path / "saved", merge=False)
    adapter = tmp_path / "saved" / "adapter"
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert written["task_type"] == ("CAUSAL_LM" if is_policy else "SEQ_CLS")
    assert lora_config(model).task_type is None  # the live one is as it was
    auto_class = AutoPeftModelForCausalLM if is_policy else AutoPeftModelForSequenceClassification
    opened = auto_class.from_pretrained(adapter, dtype=torch.float32, **({} if is_policy else {"num_labels": 1}))
    assert_near(numbers_of(opened.eval()), expected)


@pytest.mark.xdist_group("launcher")
class TestTwoProcesses:
    """Actor and critic with adapters at ZeRO 3."""

    def test_updates_are_those_of_one_process(self, group, two_processes, tmp_path):
        expected = lora_updates(tmp_path, Case(0, 1))
        weights = two_processes.tensors("lora")
        assert_weights_near(weights, expected)
        live = [name for name in weights if "lora_" in name]
        assert any(".lora_B." in name and bool(weights[name].any()) for name in live)

    def test_the_base_is_untouched_and_the_reference_is_the_base(self, two_processes):
        weights, base = two_processes.tensors("lora"), make_causal_lm()
        for name, p in base.named_parameters():
            prefixed = f"actor.inner.{name}"
            inner = prefixed.replace(".weight", ".base_layer.weight")
            assert torch.equal(weights[prefixed if prefixed in weights else inner], p)
        assert torch.equal(weights["outputs/before"], weights["outputs/after"])
        for number, row in enumerate(ROWS):
            expected, _ = hf_logprobs(base, row)
            said = weights["outputs/after"][number, : len(expected)]
            assert_near(said, expected)

    @torch.no_grad()
    def test_merged_folders_are_what_the_engines_say(self, two_processes):
        outputs = two_processes.tensors("lora")
        policy = AutoModelForCausalLM.from_pretrained(two_processes.folder / "lora" / "actor", dtype=torch.float32)
        critic = AutoModelForSequenceClassification.from_pretrained(
            two_processes.folder / "lora" / "critic", dtype=torch.float32
        )
        width = max(len(prompt) for prompt, _ in ROWS)
        for number, (prompt, response) in enumerate(ROWS):
            expected, _ = hf_logprobs(policy, (prompt, response))
            said = outputs["outputs/logprobs"][number, : len(response)]
            assert_near(said, expected)
            value = float(outputs["outputs/values"][number, width + len(response) - 1])
            assert value == near(hf_score(critic, prompt + response))

    def test_a_layers_name_chose_what_the_critic_trains(self, two_processes):
        names = [name for name in two_processes.tensors("lora") if name.startswith("critic.") and "lora_" in name]
        assert names and all(".mlp." in name for name in names)
