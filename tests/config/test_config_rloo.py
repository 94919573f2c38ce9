# SPDX-License-Identifier: Apache-2.0
"""Rules of --advantage_estimator and --samples_per_prompt, and the batches that follow."""

import pytest

from dschat.config.batches import BatchPlan
from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.config.preset_batches import preset_batches
from dschat.errors import UserError

COMMON = ["--data_path", "rows.jsonl", "--output_dir", "out", "--actor_model_name_or_path", "a"]
PPO = [*COMMON, "--critic_model_name_or_path", "c"]
RLOO = [*COMMON, "--advantage_estimator", "rloo", "--samples_per_prompt", "4"]
SCORED = [*RLOO, "--reward_model_name_or_path", "r"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text("def f(prompts, responses, rows): ...\n")


def refusal(words):
    with pytest.raises(UserError) as refused:
        parse(PPOConfig, words).plan_batches(1)
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([*SCORED, "--samples_per_prompt", "1"], ["--samples_per_prompt of at least 2", "published runs draw 4"]),
        ([*PPO, "--samples_per_prompt", "0"], ["--samples_per_prompt 0", "at least 1"]),
        (RLOO, ["--reward_model_name_or_path is missing", "--reward_function", "--reward_source programs"]),
        ([*SCORED, "--gamma", "0.9"], ["--gamma 0.9", "--advantage_estimator rloo adds up", "Drop the flag"]),
        ([*SCORED, "--macro_reward", "mean"], ["--macro_reward mean", "adds up all rewards"]),
        (
            [*SCORED, "--per_device_generation_batch_size", "3", "--per_device_training_batch_size", "5"],
            ["--per_device_training_batch_size 5", "rollout of 12 responses", "x --samples_per_prompt)", "6 or 12"],
        ),
        (
            [*SCORED, "--per_device_training_batch_size", "8", "--gradient_accumulation_steps", "3"],
            ["updates of 24, which do not divide the rollout of 64 responses", "one of 1, 2, 4 or 8"],
        ),
        (
            [*SCORED, "--per_device_training_batch_size", "8", "--global_batch_size", "24"],
            ["--global_batch_size 24", "rollout of 64 responses per process", "make it 16 or 32"],
        ),
        ([*SCORED, "--offload", "--actor_zero_stage", "0"], ["--offload needs ZeRO"]),
    ],
)
def test_refusals(words, parts):
    message = refusal(words)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "flag",
    ["--critic_learning_rate 1", "--critic_weight_decay 1", "--critic_zero_stage 1", "--critic_lora_dim 2"]
    + ["--critic_gradient_checkpointing", "--lam 1", "--value_function first", "--cliprange_value 1"]
    + ["--vf_coef 2"],
)
def test_flags_of_a_critic_are_warned_of_once(flag, caplog):
    parse(PPOConfig, [*PPO, *flag.split()])
    assert not caplog.messages
    parse(PPOConfig, [*SCORED, *flag.split()])
    assert caplog.messages == [f"{flag.split()[0]}: of no effect with --advantage_estimator rloo."]


@pytest.mark.parametrize(
    "flags",
    ["", "--zero_stage 2", "--lora_dim 4", "--policy_ratio macro", "--whiten_advantages", "--adaptive_kl_target 6"]
    + ["--offload --actor_zero_stage 2", "--termination_condition ppl --policy_ratio macro", "--isolate_last_token"]
    + ["--gradient_checkpointing"],
)
def test_sound_combinations_are_silent(flags, caplog):
    config = parse(PPOConfig, [*SCORED, *flags.split()])
    assert not caplog.messages and len(config.zero_stages) == len(config.lora_ranks) == 1
    assert config.model_paths == ["a", "r"]


@pytest.mark.parametrize("source", [["--reward_function", "score.py:f"], ["--reward_source", "programs"]])
def test_other_sources_of_the_score(source):
    config = parse(PPOConfig, [*RLOO, *source])
    assert not config.needs.critic and config.model_paths == ["a"]


def test_credit_is_never_late_without_a_critic():
    for words, late in ((PPO, True), ([*PPO, "--samples_per_prompt", "4"], True), (SCORED, False)):
        config = parse(
            PPOConfig, [*words, "--global_batch_size", str(16 * parse(PPOConfig, words).samples_per_prompt)]
        )
        plan = config.plan_batches(1)
        assert plan.updates_per_rollout == 1 and config.credit_is_fused(plan) is late


def test_updates_count_responses():
    """16 prompts by 4 responses on each of 2 processes; updates of 2 x 4 x 2 responses, twice over."""
    sizes = ["--per_device_training_batch_size", "4", "--gradient_accumulation_steps", "2", "--ppo_epochs", "2"]
    plan = parse(PPOConfig, [*SCORED, *sizes]).plan_batches(2)
    assert plan == BatchPlan(2, 4, 2, 8, 16, 16, 2 * 64 // 8, 4)
    assert (plan.global_rollout, plan.global_responses) == (32, 128)
    sizes = ["--per_device_training_batch_size", "4", "--global_batch_size", "128"]
    assert parse(PPOConfig, [*SCORED, *sizes]).plan_batches(2) == BatchPlan(2, 4, 16, 64, 128, 16, 1, 4)


PRESET = {"global_batch_size": 256, "per_device_training_batch_size": 4, "per_device_generation_batch_size": 32}


@pytest.mark.parametrize(
    ("given", "processes", "sizes"),
    [
        # prompts answered at once, generation batches: 256 / processes / samples prompts, 32 responses at once
        ({"samples_per_prompt": 4}, 8, (8, 1)),
        ({"samples_per_prompt": 4}, 1, (8, 8)),
        ({"samples_per_prompt": 4}, 64, (1, 1)),
        ({"samples_per_prompt": 64}, 1, (1, 4)),
        ({"samples_per_prompt": 4, "per_device_generation_batch_size": 2}, 8, (8, 4)),
        ({"samples_per_prompt": 3, "global_batch_size": 96}, 8, (4, 1)),
        ({}, 8, (32, 1)),
    ],
)
def test_a_rollout_of_a_preset_holds_the_responses_of_an_update(given, processes, sizes):
    flags = preset_batches(PRESET, given, processes)
    assert (flags["per_device_generation_batch_size"], flags["generation_batches"]) == sizes
    assert "samples_per_prompt" not in flags
    assert preset_batches(PRESET | {"samples_per_prompt": 2}, given, processes)["samples_per_prompt"] == given.get(
        "samples_per_prompt", 2
    )


@pytest.mark.parametrize(
    ("samples", "processes", "message"),
    [
        (
            4,
            128,
            "128 GPUs cannot share the global batch of 256 evenly, 4 responses of a prompt together: set NUM_GPUS",
        ),
        (4, 128, "is one of 1, 2, 4, 8, 16, 32, 64, or add --global_batch_size 512 or another multiple of 512."),
        (3, 8, "evenly, 3 responses of a prompt together: add --global_batch_size 240 or another multiple of 24."),
    ],
)
def test_gpus_that_cannot_share_whole_prompts(samples, processes, message):
    with pytest.raises(UserError) as refused:
        preset_batches(PRESET, {"samples_per_prompt": samples}, processes)
    assert message in str(refused.value)


def test_a_critic_that_is_named_is_the_reward_model(caplog):
    config = parse(PPOConfig, [*RLOO, "--critic_model_name_or_path", "c"])
    assert (config.critic_model_name_or_path, config.reward_model_name_or_path) == (None, "c")
    assert "--critic_model_name_or_path: --advantage_estimator rloo has no critic" in caplog.text
    config = parse(PPOConfig, [*SCORED, "--critic_model_name_or_path", "c"])
    assert (config.critic_model_name_or_path, config.reward_model_name_or_path) == (None, "r")


def test_macro_actions_that_change_nothing_are_said(caplog):
    parse(PPOConfig, [*SCORED, "--termination_condition", "randomized"])
    assert "--policy_ratio macro or macro_mean alone" in caplog.text
    caplog.clear()
    parse(PPOConfig, [*SCORED, "--termination_condition", "randomized", "--policy_ratio", "macro"])
    assert "macro_mean alone" not in caplog.text
