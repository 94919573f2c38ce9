# SPDX-License-Identifier: Apache-2.0
"""Combinations of flags that are unwise or without effect warn once and name the flag; sound ones are silent."""

import pytest

from flag_cases import RLOO, SCORED, config_of

SOUND = {
    "ppo": [
        "--dtype fp16",
        "--macro_reward mean --isolate_last_token",
        "--macro_reward mean --isolate_last_token --value_function first",
        "--macro_reward mean --ngram 1",
        "--macro_reward mean --value_function unit",
        "--termination_condition turn --isolate_last_token --normalize_advantages row",
        "--policy_ratio sequence_mean --rollout_is_mask 0.2 4 --rollout_engine vllm --vllm_url http://h:1",
        "--num_warmup_steps 0 --warmup_ratio 0.1",
        "--lr_scheduler_type constant --warmup_ratio 0",
        "--kl_coef 0",
        "--termination_condition randomized --ngram_lengths 1",
        "--top_k 0 --top_p 1",
        "--termination_condition parsing --parser chunker",
        "--termination_condition parsing --parser_device cuda:1",
        "--no_merge_lora --actor_lora_dim 4",
        "--segment_rewards each --advantage_estimator sae --critic_warmup_updates 2",
        "--advantage_estimator sae --normalize_advantages row --ngram inf",
        "--segment_rewards each --advantage_estimator evpo --value_function first --clip_reward_value none",
        "--offload --actor_zero_stage 3 --critic_zero_stage 1",
    ],
    "sft": [
        "--lora_alpha 4 --finetune_mode lora",
        "--lora_dropout 0.1 --finetune_mode lora",
        "--offload --zero_stage 1",
    ],
    "reward": ["--reward_loss per_sample", "--reward_loss end", "--offload --zero_stage 1"],
    "online": ["--offload --zero_stage 0", "--offload --zero_stage 2", "--offload --zero_stage 3"],
}


@pytest.mark.parametrize(("step", "flags"), [(step, flags) for step, given in SOUND.items() for flags in given])
def test_sound_combinations_are_silent(step, flags, caplog):
    config_of(step, flags)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("step", "flags", "message"),
    [
        ("ppo", "--macro_reward mean --value_function first", "--isolate_last_token"),
        ("ppo", "--advantage_estimator sae --value_function first", "--value_function: of no effect with"),
        (
            "ppo",
            "--termination_condition line --ngram 1",
            "--ngram: of no effect without --termination_condition fixed",
        ),
        ("ppo", "--top_k 50", "--top_k 50 and --top_p 1 truncate"),
        ("ppo", "--top_p 0.9", "--top_k 0 and --top_p 0.9 truncate"),
        ("ppo", "--parser_cutoff 4 --parser_device cuda", "--parsing_cutoff, --parser_device: of no effect without"),
        ("ppo", "--termination_condition parsing --parser chunker --parser_device cuda:1", "only benepar uses it"),
        ("ppo", "--no_merge_lora", "--no_merge_lora: of no effect without --lora_dim"),
        (
            "sft",
            "--lora_module_name q_proj --lora_alpha 4 --lora_dropout 0.1",
            "--lora_module_name, --lora_alpha, --lora_dropout: of no effect without --lora_dim",
        ),
        ("ppo", "--policy_ratio sequence_mean", "GSPO's are --cliprange 3e-4 --cliprange_high 4e-4"),
        # losses that leave the score of step 3 untrained
        ("reward", "--reward_loss last_token", "--reward_loss last_token does not train the number"),
    ],
)
def test_unwise_combinations_warn_once(step, flags, message, caplog):
    config_of(step, flags)
    assert [message in said for said in caplog.messages] == [True]


@pytest.mark.parametrize(
    "flag",
    ["--critic_learning_rate 1", "--critic_lora_dim 2", "--critic_gradient_checkpointing", "--lam 1"]
    + ["--critic_weight_decay 1", "--critic_zero_stage 1", "--value_function first", "--cliprange_value 1"]
    + ["--vf_coef 2"],
)
def test_flags_of_a_critic_are_warned_of_once(flag, caplog):
    config_of("ppo", flag)
    assert not caplog.messages
    config_of("ppo", flag, SCORED)
    assert caplog.messages == [f"{flag.split()[0]}: of no effect with --advantage_estimator rloo."]


@pytest.mark.parametrize(
    "flags",
    ["", "--zero_stage 2", "--lora_dim 4", "--policy_ratio macro", "--whiten_advantages", "--adaptive_kl_target 6"]
    + ["--offload --actor_zero_stage 2", "--termination_condition ppl --policy_ratio macro"]
    + ["--gradient_checkpointing", "--termination_condition randomized --policy_ratio macro"]
    + ["--advantage_estimator reinforce_pp --samples_per_prompt 1 --gamma 0.9 --termination_condition sentence"]
    + ["--advantage_estimator tempo --termination_condition line", "--advantage_estimator reinforce_pp_baseline"]
    + ["--advantage_estimator grpo --kl_in loss --kl_estimator k3 --loss_mean response --drop_equal_groups"]
    + ["--advantage_estimator dr_grpo --drop_equal_groups --refill_rounds 2"]
    + ["--policy_ratio sequence_mean --cliprange 3e-4 --cliprange_high 4e-4", "--length_buffer 16 --length_penalty 2"]
    + ["--advantage_estimator dr_grpo --loss_mean length", "--loss_mean macro --termination_condition sentence"],
)
def test_sound_combinations_without_a_critic(flags, caplog):
    config = config_of("ppo", flags, SCORED)
    assert not caplog.messages and len(config.zero_stages) == len(config.lora_ranks) == 1
    assert config.model_paths == ["a", "r"]


@pytest.mark.parametrize("flag", ["--ngram 1", "--isolate_last_token", "--termination_condition randomized"])
def test_macro_actions_that_nothing_reads_are_warned_of(flag, caplog):
    config_of("ppo", flag, SCORED)
    (said,) = caplog.messages
    assert said.startswith(flag.split()[0])
    assert "only with --policy_ratio macro or macro_mean, or with --loss_mean macro" in said


def test_macro_actions_that_get_rewards_of_their_own_are_not_warned_of(caplog):
    config_of("ppo", "--reward_function score.py:f --segment_rewards each --ngram 3", RLOO)
    (said,) = caplog.messages
    assert said.startswith("--segment_rewards: --advantage_estimator rloo adds up the rewards of a response")


def test_a_critic_that_is_named_is_the_reward_model(caplog):
    config = config_of("ppo", "--critic_model_name_or_path c", RLOO)
    assert (config.models.critic_model_name_or_path, config.rewards.reward_model_name_or_path) == (None, "c")
    assert "--critic_model_name_or_path: --advantage_estimator rloo has no critic" in caplog.text
    config = config_of("ppo", "--critic_model_name_or_path c", SCORED)
    assert (config.models.critic_model_name_or_path, config.rewards.reward_model_name_or_path) == (None, "r")


def test_flags_without_a_meaning_in_refuel_warn_once_and_say_why(caplog):
    given = "--task.cluster a100 --wandb_project_name p --track --wandb_project_name q"
    assert config_of("online", given) == config_of("online")
    assert len(caplog.messages) == 3
    assert all(" does nothing here: " in message for message in caplog.messages)
    assert caplog.messages[0].startswith("--task.cluster") and "not kept" in caplog.messages[0]
