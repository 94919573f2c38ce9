# SPDX-License-Identifier: Apache-2.0
"""Batches of --samples_per_prompt, with and without a critic, and those of the presets."""

import pytest

from dschat.base.errors import UserError
from dschat.settings.batches import BatchPlan
from dschat.settings.presets import batch_sizes
from flag_cases import REQUIRED, SCORED, config_of

SEVERAL = [*REQUIRED["ppo"], "--samples_per_prompt", "4"]


def test_credit_is_never_late_without_a_critic_or_where_only_some_tokens_count():
    """An update counts such tokens before its first forward pass."""
    for words, flags, late in (
        (REQUIRED["ppo"], "--global_batch_size 16", True),
        (SEVERAL, "--global_batch_size 64", True),
        (SCORED, "--global_batch_size 64", False),
        (SEVERAL, "--global_batch_size 64 --drop_equal_groups", False),
        (SEVERAL, "--global_batch_size 64 --max_token_probability 0.9", False),
    ):
        config = config_of("ppo", flags, words)
        plan = config.plan_batches(1)
        assert plan.updates_per_rollout == 1 and config.credit_is_fused(plan) is late


def test_updates_count_responses():
    """16 prompts by 4 responses on each of 2 processes; updates of 2 x 4 x 2 responses, twice over."""
    sizes = "--per_device_training_batch_size 4 --gradient_accumulation_steps 2 --ppo_epochs 2"
    plan = config_of("ppo", sizes, SCORED).plan_batches(2)
    assert plan == BatchPlan(2, 4, 2, 8, 16, 16, 2 * 64 // 8, 4)
    assert (plan.global_rollout, plan.global_responses) == (32, 128)
    sizes = "--per_device_training_batch_size 4 --global_batch_size 128"
    assert config_of("ppo", sizes, SCORED).plan_batches(2) == BatchPlan(2, 4, 16, 64, 128, 16, 1, 4)


MOST, BATCH = {"per_device_training_batch_size": 4, "per_device_generation_batch_size": 32}, {"global_batch_size": 256}


@pytest.mark.parametrize(
    ("given", "processes", "sizes"),
    [
        # prompts answered at once, generation batches: 256 / processes / samples prompts, 32 responses at once
        ({"samples_per_prompt": 4}, 8, (8, 1)),
        ({"samples_per_prompt": 64}, 1, (1, 4)),
        ({"samples_per_prompt": 4, "per_device_generation_batch_size": 2}, 8, (8, 4)),
        ({}, 8, (32, 1)),
    ],
)
def test_a_rollout_of_a_preset_holds_the_responses_of_an_update(given, processes, sizes):
    flags = batch_sizes(MOST, BATCH | given, processes)
    assert (flags["per_device_generation_batch_size"], flags["generation_batches"]) == sizes


def test_gpus_that_cannot_share_whole_prompts():
    with pytest.raises(UserError) as refused:
        batch_sizes(MOST, BATCH | {"samples_per_prompt": 4}, 128)
    message = str(refused.value)
    assert "4 responses of a prompt together: give another number of GPUs" in message
    assert "or add --global_batch_size 512 or another multiple of 512." in message
