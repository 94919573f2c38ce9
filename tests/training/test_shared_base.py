# SPDX-License-Identifier: Apache-2.0
"""One base in memory for all models of step 3 (--share_base)."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from closeness import assert_near, assert_weights_near, near
from dschat.base.errors import UserError
from dschat.run.distributed import device
from dschat.training.steps.ppo import check_ppo_lengths
from factories import hf_logprobs, hf_score, make_classifier, ragged_rows, save_engines, save_folder
from resume_runs import check_every_stop
from shared_base_runs import (
    config_of,
    separate_trainer_of,
    storages,
    trainer_of,
    two_updates,
    write_adapter,
    write_base,
)

SLOW_FORMS = [
    {"actor_zero_stage": 2, "critic_zero_stage": 0},
    {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True},
    {"critic_lora_dim": 3, "critic_model_name_or_path": None},
    {"zero_stage": 3, "ppo_epochs": 1, "critic_gradient_checkpointing": True},
]
FORMS = [
    {"zero_stage": 2, "ppo_epochs": 1},
    {"advantage_estimator": "rloo", "samples_per_prompt": 2, "per_device_generation_batch_size": 4},
    *(pytest.param(flags, marks=pytest.mark.slow) for flags in SLOW_FORMS),
]


def paths(folder, tokenizer, kind="gemma"):
    base = write_base(folder, tokenizer, kind)
    adapter = write_adapter(folder / "reward", base, tokenizer)
    return base, {"critic_model_name_or_path": adapter, "reward_model_name_or_path": adapter}


def both(tmp_path, tokenizer, base, flags):
    flags = {name: value for name, value in flags.items() if value is not None}
    shared = trainer_of(tmp_path / "shared", base, tokenizer, **flags)
    other = separate_trainer_of(tmp_path / "separate", base, tokenizer, **flags)
    return shared, other


def name_of(flags):
    return ",".join(f"{name}={value}" for name, value in flags.items())


@pytest.mark.parametrize("flags", FORMS, ids=name_of)
def test_updates_are_those_of_separate_models(flags, group, tokenizer, tmp_path):
    base, models = paths(tmp_path, tokenizer)
    if "advantage_estimator" in flags:
        models["critic_model_name_or_path"] = None
    shared, other = both(tmp_path, tokenizer, base, models | flags)
    inner, in_parts = shared.algorithm.models.actor.module.inner, flags.get("zero_stage") == 3
    before = {name: p.detach().clone() for name, p in inner.named_parameters()}
    if not in_parts:
        kept = storages(inner).items()
        for model in (shared.algorithm.models.critic, shared.algorithm.models.reward.model):
            if model is not None:
                own = storages(model.module.inner)
                assert own and own.items() <= kept
        of_other = other.algorithm.models.actor.module.inner
        assert not storages(other.algorithm.models.reward.model.module.inner).items() <= storages(of_other).items()
    found, expected = two_updates(shared), two_updates(other)
    assert found[1] == near(expected[1])
    assert_weights_near(found[0], expected[0])
    if not in_parts:
        moved = {name for name, p in inner.named_parameters() if not torch.equal(p, before[name])}
        assert moved and all(".lora_" in name for name in moved)


@pytest.mark.slow
@pytest.mark.parametrize("every", [23, 1])
def test_a_run_stops_anywhere_and_goes_on(every, group, tokenizer, tmp_path):
    base, models = paths(tmp_path, tokenizer)

    def make(folder, **flags):
        more = {"zero_stage": 2, "enable_ema": True, "normalize_scores": True}
        return trainer_of(folder, base, tokenizer, **models, **more, **flags)

    check_every_stop(make, tmp_path, every, first=10 if every > 1 else 0)


KINDS = ["gemma", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "gemma2", "llama"))]


@pytest.mark.parametrize("kind", KINDS)
def test_families_and_what_is_saved(kind, group, tokenizer, tmp_path):
    """transformers opens the merged models, and gives the engines' numbers; the reference is the base."""
    base, models = paths(tmp_path, tokenizer, kind)
    trainer = trainer_of(tmp_path / "out", base, tokenizer, **models)
    two_updates(trainer)
    actor, critic = trainer.algorithm.models.actor, trainer.algorithm.models.critic
    save_engines(tmp_path / "saved", tokenizer, actor=actor, critic=critic)
    prompt, response = ragged_rows([4], [5], seed=3)[0]
    ids = torch.tensor([prompt + response])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "actor")
    own, _ = actor(ids.to(device()), None, len(response))
    assert_near(own[0].cpu(), hf_logprobs(opened, (prompt, response))[0])
    score = critic(ids.to(device()), None)[0, -1].item()
    opened = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved" / "critic")
    assert hf_score(opened, prompt + response) == near(score)
    reference, _ = trainer.algorithm.models.reference(ids.to(device()), None, len(response))
    expected = hf_logprobs(AutoModelForCausalLM.from_pretrained(base), (prompt, response))[0]
    assert_near(reference[0].cpu(), expected)


def count(prompts, responses, rows):
    raise AssertionError("nothing is scored")


def refused(tmp_path, base, **flags):
    with pytest.raises(UserError) as caught:
        check_ppo_lengths(config_of(tmp_path / "out", base, share_base=True, **flags))
    return str(caught.value)


def test_what_cannot_share_is_refused_by_name(tokenizer, tmp_path, caplog):
    base, models = paths(tmp_path, tokenizer)
    path = models["critic_model_name_or_path"]
    whole = save_folder(tmp_path / "whole", make_classifier(), tokenizer)
    assert "whole holds no LoRA adapter" in refused(tmp_path, base, critic_model_name_or_path=whole)
    assert "has rank 2. Give --critic_lora_dim 2" in refused(tmp_path, base, **models, critic_lora_dim=4)
    offload = refused(tmp_path, base, **models, offload_reference_model=True)
    assert offload.startswith("--offload_reference_model: with --share_base")
    function = refused(tmp_path, base, reward_function=f"{__file__}:count", offload_reference_model=True)
    assert function == offload
    other = write_base(tmp_path / "other", tokenizer, "gpt2")
    assert f"was trained on another base, {base}" in refused(tmp_path, other, **models)
    alone = refused(tmp_path, other, reward_model_name_or_path=path)
    assert "is an adapter alone" in alone and f"trained on another base, {base}" in alone
    assert "give --lora_dim" in refused(tmp_path, base, **models, lora_dim=0)
    assert "give --lora_dim" in refused(tmp_path, base, **models, lora_dim=0, actor_lora_dim=2)
    assert "ZeRO 3 for one of" in refused(tmp_path, base, **models, actor_zero_stage=3)
    check_ppo_lengths(config_of(tmp_path / "out", base, share_base=True, **models))
    caplog.clear()
    without_reward_model = {"critic_model_name_or_path": path, "reward_url": "http://localhost:1"}
    with caplog.at_level(logging.INFO):
        check_ppo_lengths(config_of(tmp_path / "out", base, share_base=True, **without_reward_model))
    assert not caplog.messages, "nothing is said about a reward model"
