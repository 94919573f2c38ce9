# SPDX-License-Identifier: Apache-2.0
"""Batch arithmetic, with numbers worked out by hand."""

from dataclasses import replace
from itertools import product

import pytest

from dschat.base.errors import UserError
from dschat.settings.batches import BatchPlan, BatchSizes, plan_batches, smaller_sizes
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
    ("wanted", "world_size", "nearest"),
    [(100, 1, 96), (100, 4, 128), (100, 3, 96), (8, 1, 16)],  # 100 is nearer to 128 than to 64
)
def test_unreachable_global_batch_names_the_nearest(wanted, world_size, nearest):
    with pytest.raises(UserError) as refusal:
        _supervised(RewardConfig, global_batch_size=wanted).plan_batches(world_size)
    assert f"--global_batch_size {wanted} is not a multiple of --per_device_train_batch_size 16" in str(refusal.value)
    assert _remedy(refusal.value) == f"--global_batch_size {nearest}"


def test_processes_that_vllm_cannot_divide():
    config = _ppo(rollout_engine="vllm", vllm_tensor_parallel=4)
    assert config.plan_batches(8).world_size == 8
    with pytest.raises(UserError, match="--vllm_tensor_parallel 4 does not divide .* processes, 6: .* 1, 2, 3, 6"):
        config.plan_batches(6)


def test_accumulation_and_global_batch_must_agree():
    config = _supervised(SFTConfig, gradient_accumulation_steps=2, global_batch_size=64)
    with pytest.raises(UserError) as refusal:
        config.plan_batches(1)
    assert "makes a global batch of 32 with" in str(refusal.value)
    assert _remedy(refusal.value) == "--gradient_accumulation_steps 4"


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
    ("config", "problem", "batches"),
    [
        (_ppo(16, 1, 16, global_batch_size=128), "an update of 64 responses per process", 4),
        (_ppo(16, 1, 5), "does not divide its rollout of 16", 5),
        (_ppo(16, 1, 4, gradient_accumulation_steps=3), "an update of 12 responses per process", 3),
        # 24 is a multiple of 4 x 2, but 12 responses per process do not divide 32; three batches of 32 are 96.
        (_ppo(16, 1, 4, global_batch_size=24, samples_per_prompt=2), "does not divide its rollout of 32", 3),
    ],
)
def test_updates_that_do_not_fit_a_rollout(config, problem, batches):
    with pytest.raises(UserError) as refusal:
        config.plan_batches(2)
    assert problem in str(refusal.value)
    assert _remedy(refusal.value) == f"--generation_batches {batches}"


def _remedy(message):
    """The flag and value that a message of batch arithmetic proposes."""
    return str(message).split(": give ")[1].partition(", or")[0]


def _followed(sizes, words):
    """The sizes after a command line of remedies."""
    flags = dict(zip(words.split()[::2], words.split()[1::2], strict=True))
    values = {name.removeprefix("--"): int(value) for name, value in flags.items()}
    if sizes.micro_flag in values:
        values["micro_batch"] = values.pop(sizes.micro_flag)
    return replace(sizes, **values)


def _grid():
    """Sizes of steps 1 and 2, and of step 3, most of which do not fit together."""
    for sizes in product((1, 4, 5), (None, 3), (None, 8, 50, 101)):
        yield BatchSizes("per_device_train_batch_size", *sizes)
        for rollout in product((1, 6, 16), (1, 3), (1, 4)):
            yield BatchSizes("per_device_training_batch_size", *sizes, *rollout)


@pytest.mark.parametrize("world_size", [1, 3])
def test_remedies_lead_to_sizes_that_fit(world_size):
    """One after another; none of them brings back what an earlier one has changed."""
    for sizes in _grid():
        for _ in range(4):
            try:
                plan = plan_batches(sizes, world_size)
                break
            except UserError as error:
                sizes = _followed(sizes, _remedy(error))
        else:
            raise AssertionError(sizes)
        if plan.iteration_size > 7:
            words = smaller_sizes(sizes, world_size, examples=7)
            assert 0 < plan_batches(_followed(sizes, words), world_size).iteration_size <= 7


def test_examples_are_fewer_than_processes():
    assert smaller_sizes(BatchSizes("per_device_train_batch_size", 4), 3, 2) == ""
