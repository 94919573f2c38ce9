# SPDX-License-Identifier: Apache-2.0
"""Default values, and values that follow from other flags."""

import re
from pathlib import Path

import pytest

from dschat.base.errors import UserError
from dschat.settings.flags import flags_on_resume
from dschat.settings.ppo import PPOConfig
from flag_cases import FAMILIES, config_of


def test_what_a_resume_may_change_is_what_the_document_says():
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = text.split("## What may change between two parts of a run")[1].split("Everything else")[0]
    free, shares = section.split("On another number of processes")
    kinds = {"free": set(), "share": set()}
    for config_class in FAMILIES.values():
        for kind, names in kinds.items():
            names |= flags_on_resume(config_class, kind)
    assert set(re.findall(r"`--(\w+)`", free)) == kinds["free"] | {"reward_url"}
    assert set(re.findall(r"`--(\w+)`", shares)) == kinds["share"]


def test_defaults_of_refuel_are_the_published_run():
    """flags.txt has the others."""
    config = config_of("refuel")
    assert config.plan_batches(8).global_batch == 128
    assert config.total_iterations(per_epoch=499, size=128) == 500
    assert (
        config.optimisation.warmup_ratio,
        config.optimisation.gradient_accumulation_steps,
        config.model.weight_decay,
    ) == (0.1, 16, 1e-6)


def test_what_follows_from_refuels_flags():
    for steps in (0, 3):  # also no warm-up at all
        assert config_of("refuel", f"--num_warmup_steps {steps}").warmup_updates(500) == steps
    assert config_of("refuel", "--global_batch_size 6").plan_batches(2).accumulation == 3
    epochs = config_of("refuel", "--total_episodes 0 --num_train_epochs 3")
    assert epochs.total_iterations(per_epoch=7, size=10) == 21
    with pytest.raises(UserError, match="--total_episodes 9 is less than one batch of 10 pairs"):
        config_of("refuel", "--total_episodes 9").total_iterations(7, 10)


def test_a_round_of_refuel_is_one_batch():
    plan = config_of("online").plan_batches(8)
    assert (plan.global_batch, plan.global_rollout, plan.updates_per_rollout) == (8, 8, 4)


def test_evaluations_of_refuel_are_counted_in_rounds():
    words = "--print_sample_output_freq 200"
    assert config_of("online", words).output.eval_interval == 800
    assert config_of("online", f"{words} --noptepochs 1").output.eval_interval == 200


def test_values_that_follow_from_other_flags():
    config = config_of("ppo", "--bf16")
    assert (config.engine.dtype, config.rewards.reward_model_name_or_path) == ("bf16", "c")
    assert config.output.tensorboard_path == "out/tensorboard"
    assert config_of("ppo", "--bf16 --dtype bf16").engine.dtype == "bf16"
    base = {"data_path": ["a"], "output_dir": "o", "actor_model_name_or_path": "a"}
    config = PPOConfig(**base, zero_stage=2, lora_dim=8, critic_zero_stage=0, actor_lora_dim=4)
    assert (config.memory.actor_zero_stage, config.memory.critic_zero_stage) == (2, 0)
    assert (config.memory.actor_lora_dim, config.memory.critic_lora_dim) == (4, 8)


@pytest.mark.parametrize(
    ("flags", "actor", "critic"),
    [
        ("", False, False),
        ("--gradient_checkpointing", True, True),
        ("--actor_gradient_checkpointing", True, False),
        ("--gradient_checkpointing --critic_gradient_checkpointing no", True, False),
        ("--gradient_checkpointing no --critic_gradient_checkpointing", False, True),
    ],
)
def test_gradient_checkpointing_is_that_of_both_models_unless_one_has_its_own(flags, actor, critic):
    config = config_of("ppo", flags)
    assert (config.memory.actor_gradient_checkpointing, config.memory.critic_gradient_checkpointing) == (actor, critic)


def test_warmup_updates():
    assert config_of("sft").warmup_updates(145) == 0
    assert config_of("sft", "--num_warmup_steps 6").warmup_updates(145) == 6
    assert config_of("sft", "--warmup_ratio 0.1").warmup_updates(145) == 15
