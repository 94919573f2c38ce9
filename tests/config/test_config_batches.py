# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic, with numbers worked out by hand."""

import pytest

from dschat.base.errors import UserError
from dschat.settings.batches import BatchPlan
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import RewardConfig, SFTConfig


def _supervised(config_class, **sizes):
    return config_class(data_path=["rows.jsonl"], output_dir="out", model_name_or_path="m", **sizes)


def _ppo(generation=16, batches=1, training=16, **sizes):
    return PPOConfig(
        data_path=["rows.jsonl"],
        output_dir="out",
        actor_model_name_or_path="a",
        critic_model_name_or_path="c",
        per_device_generation_batch_size=generation,
        generation_batches=batches,
        per_device_training_batch_size=training,
        **sizes,
    )


@pytest.mark.parametrize("config_class", [SFTConfig, RewardConfig])
def test_steps_1_and_2_have_no_rollout(config_class):
    config = _supervised(config_class, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert config.plan_batches(8) == BatchPlan(8, 4, 3, 12, 96)


@pytest.mark.parametrize("given", [None, 16])
def test_global_batch_derives_the_accumulation(given):
    config = _supervised(
        SFTConfig, per_device_train_batch_size=4, gradient_accumulation_steps=given, global_batch_size=512
    )
    assert config.plan_batches(8) == BatchPlan(8, 4, 16, 64, 512)


@pytest.mark.parametrize(
    ("wanted", "world_size", "words"),
    [
        (100, 1, "--per_device_train_batch_size 16 on 1 process: make it 96 or 112"),
        (100, 4, "--per_device_train_batch_size 16 on 4 processes: make it 64 or 128"),
        (8, 1, "make it 16,"),
    ],
)
def test_unreachable_global_batch_names_the_nearest(wanted, world_size, words):
    with pytest.raises(UserError) as refusal:
        _supervised(RewardConfig, global_batch_size=wanted).plan_batches(world_size)
    assert f"--global_batch_size {wanted}" in str(refusal.value)
    assert words in str(refusal.value)
    assert "change --per_device_train_batch_size" in str(refusal.value)


def test_processes_that_vllm_cannot_divide():
    config = _ppo(rollout_engine="vllm", vllm_tensor_parallel=4)
    assert config.plan_batches(8).world_size == 8
    with pytest.raises(UserError, match="--vllm_tensor_parallel 4 does not divide .* processes, 6: .* 1, 2, 3, 6"):
        config.plan_batches(6)


def test_accumulation_and_global_batch_must_agree():
    config = _supervised(SFTConfig, gradient_accumulation_steps=2, global_batch_size=64)
    with pytest.raises(UserError) as refusal:
        config.plan_batches(1)
    assert "makes a global batch of 32, but --global_batch_size is 64" in str(refusal.value)
    assert "drop --gradient_accumulation_steps (it would be 4)" in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "world_size", "plan"),
    [
        (_ppo(), 1, BatchPlan(1, 16, 1, 16, 16, 16, 1)),
        (_ppo(8, 4, 2, gradient_accumulation_steps=4, ppo_epochs=3), 1, BatchPlan(1, 2, 4, 8, 8, 32, 12)),
        # 8 processes, 32 prompts each: the published global batch of 256 in one update per rollout
        (_ppo(16, 2, 4, global_batch_size=256), 8, BatchPlan(8, 4, 8, 32, 256, 32, 1)),
        (_ppo(16, 2, 4, global_batch_size=64, gradient_accumulation_steps=2), 8, BatchPlan(8, 4, 2, 8, 64, 32, 4)),
    ],
)
def test_rollouts_and_updates(config, world_size, plan):
    assert config.plan_batches(world_size) == plan


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            _ppo(16, 1, 5),
            ["--per_device_training_batch_size 5", "rollout of 16", "one of 1, 2, 4, 8 or 16", "multiple of 5"],
        ),
        (
            _ppo(16, 1, 4, gradient_accumulation_steps=3),
            ["--gradient_accumulation_steps 3", "updates of 12", "one of 1, 2 or 4", "multiple of 12"],
        ),
        (
            _ppo(16, 1, 16, gradient_accumulation_steps=2),
            ["--gradient_accumulation_steps one of 1,", "multiple of 32"],
        ),
        # 24 is a multiple of 4 x 2, but 12 prompts per process do not divide 16
        (
            _ppo(16, 1, 4, global_batch_size=24),
            ["--global_batch_size 24", "rollout of 16 prompts per process", "make it 16 or 32,"],
        ),
        (_ppo(16, 1, 4, global_batch_size=1000), ["--global_batch_size 1000", "make it 32,"]),
        (_ppo(16, 1, 4, global_batch_size=4), ["--global_batch_size 4", "make it 8,"]),
        (
            _ppo(16, 1, 4, global_batch_size=32, gradient_accumulation_steps=2),
            ["--gradient_accumulation_steps 2", "drop --gradient_accumulation_steps (it would be 4)"],
        ),
    ],
)
def test_updates_that_do_not_fit_a_rollout(config, words):
    with pytest.raises(UserError) as refusal:
        config.plan_batches(2)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
