# SPDX-License-Identifier: Apache-2.0
"""Default values, and values that follow from other flags."""

import dataclasses
import math

import pytest

from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelConfig, RefuelOnlineConfig
from dschat.config.supervised import DPOConfig, RewardConfig, SFTConfig

COMMON = ["--data_path", "rows.jsonl", "--output_dir", "out"]
SFT = [*COMMON, "--model_name_or_path", "m"]
PPO = [*COMMON, "--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in a folder of its own, as a single process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "score.py").write_text("def f(prompts, responses, rows): ...\n")


def test_defaults_of_step_1():
    config = parse(SFTConfig, SFT)
    assert dataclasses.asdict(config) == {
        "data_path": ["rows.jsonl"],
        "data_split": "2,4,4",
        "prompt_key": "prompt",
        "chosen_key": "chosen",
        "rejected_key": "rejected",
        "response_key": "response",
        "messages_key": "messages",
        "end_of_conversation_token": None,
        "output_dir": "out",
        "overwrite_output_dir": False,
        "save_steps": 0,
        "save_total_limit": 2,
        "save_models": 0,
        "resume_from_checkpoint": None,
        "eval_interval": 0,
        "eval_iters": 100,
        "enable_tensorboard": False,
        "tensorboard_path": "out/tensorboard",
        "report_to": [],
        "push_to_hub": None,
        "seed": 1234,
        "num_train_epochs": 1,
        "ddp_timeout": 1800,
        "gradient_accumulation_steps": None,
        "global_batch_size": None,
        "lr_scheduler_type": "cosine",
        "num_warmup_steps": 0,
        "warmup_ratio": None,
        "gradient_clipping": 1.0,
        "on_nonfinite": "stop",
        "dtype": None,
        "bf16": False,
        "attn_implementation": "sdpa",
        "zero_stage": 0,
        "offload": False,
        "finetune_mode": None,
        "lora_dim": 0,
        "lora_module_name": None,
        "lora_alpha": None,
        "lora_dropout": 0.0,
        "merge_lora": True,
        "self_checks": True,
        "deepspeed": False,
        "deepspeed_config": None,
        "local_rank": -1,
        "model_name_or_path": "m",
        "max_seq_len": 1024,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "gradient_checkpointing": False,
        "learning_rate": 2e-5,
        "weight_decay": 0.01,
        "sft_on_prompt": False,
        "label_smoothing": 0.0,
        "train_on": "last",
        "packing": False,
    }


def test_defaults_of_step_2_differ_in_rate_and_decay():
    config = parse(RewardConfig, SFT)
    assert (config.learning_rate, config.weight_decay, config.lr_scheduler_type) == (1e-5, 0.1, "cosine")
    assert not hasattr(config, "sft_on_prompt")
    assert (config.reward_loss, config.margin_key, config.center_rewards_coefficient) == ("end", None, 0.0)
    assert not config.reward_gain


def test_defaults_of_dpo():
    config = parse(DPOConfig, SFT)
    assert (config.learning_rate, config.weight_decay, config.lr_scheduler_type) == (5e-7, 0.1, "cosine")
    assert (config.beta, config.label_smoothing, config.reference_free, config.step) == (0.1, 0.0, False, 2)


def test_defaults_of_refuel_are_the_published_run():
    config = parse(RefuelConfig, SFT)
    expected = {"learning_rate": 3e-7, "weight_decay": 1e-6, "eta": 1000, "temperature": 0.8, "max_seq_len": 2048}
    expected |= {"total_episodes": 64000, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "seed": 555134}
    expected |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 16}
    expected |= {"eval_interval": 100, "gradient_clipping": 0, "optimizer": "adamw", "start_idx": 0, "end_idx": -1}
    expected |= {"cluster": None, "eval_iters": 0}
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.plan_batches(8).global_batch == 128
    assert config.total_updates(per_epoch=499, global_batch=128) == 500


def test_what_follows_from_refuels_flags():
    assert parse(RefuelConfig, [*SFT, "--optimizer", "adam"]).weight_decay == 0
    assert parse(RefuelConfig, [*SFT, "--num_warmup_steps", "3"]).warmup_ratio is None
    config = parse(RefuelConfig, [*SFT, "--global_batch_size", "6"])
    assert config.plan_batches(2).accumulation == 3
    epochs = parse(RefuelConfig, [*SFT, "--total_episodes", "0", "--num_train_epochs", "3"])
    assert epochs.total_updates(per_epoch=7, global_batch=10) == 21
    assert parse(RefuelConfig, [*SFT, "--total_episodes", "3"]).total_updates(7, 10) == 1


def test_defaults_of_step_3():
    config = parse(PPOConfig, PPO)
    expected = {
        "lr_scheduler_type": "linear",
        "reward_function": None,
        "reward_url": None,
        "reward_weights": None,
        "on_reward_error": "stop",
        "rm_template": False,
        "reward_batch": 64,
        "reward_timeout": 60.0,
        "reward_patience": 300.0,
        "metric_function": None,
        "reward_source": None,
        "program_reward": "paper",
        "sandbox_level": "namespaces",
        "sandbox_workers": 4,
        "max_tests": None,
        "drop_unsolvable": False,
        "per_device_generation_batch_size": 16,
        "generation_batches": 1,
        "samples_per_prompt": 1,
        "advantage_estimator": "gae",
        "per_device_training_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "ppo_epochs": 1,
        "max_prompt_seq_len": 512,
        "max_answer_seq_len": 512,
        "actor_learning_rate": 1.5e-5,
        "critic_learning_rate": 1.5e-5,
        "actor_weight_decay": 0.1,
        "critic_weight_decay": 0.1,
        "kl_coef": 0.05,
        "gamma": 1.0,
        "lam": 0.95,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "rollout_engine": "compacting",
        "vllm_gpu_memory": 0.3,
        "rollout_is_clip": None,
        "clip_reward_value": None,
        "missing_eos_penalty": None,
        "termination_condition": "fixed",
        "ngram": 5,
        "repeat_times": 3,
        "ngram_lengths": [2, 3, 5, 10],
        "parsing_cutoff": 5,
        "parser": "benepar",
        "parser_model": None,
        "parser_device": "cpu",
        "ppl_mode": "chunk",
        "value_function": "equal",
        "macro_reward": "sum",
        "isolate_last_token": False,
        "policy_ratio": "token",
        "whiten_advantages": False,
        "normalize_advantages": None,
        "share_base": False,
        "normalize_scores": False,
        "vf_coef": 1.0,
        "kl_estimator": "k1",
        "adaptive_kl_target": None,
        "adaptive_kl_horizon": 10000,
        "max_kl": None,
        "kl_action": "warn",
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_defaults_of_refuel_online():
    config = parse(RefuelOnlineConfig, [*SFT, "--reward_model", "r"])
    expected = {
        "data_split": "0,0,1",
        "lr_scheduler_type": "linear",
        "offload": False,
        "reward_function": None,
        "trained_layers": 0,
        "gradient_checkpointing": False,
        "max_turns": 5,
        "max_prompt_seq_len": 128,
        "max_answer_seq_len": 512,
        "max_seq_len": 4096,
        "temperature": 1.0,
        "rollout_engine": "compacting",
        "total_episodes": None,
        "per_device_train_batch_size": 1,
        "per_device_generation_batch_size": 16,
        "per_device_eval_batch_size": 4,
        "eval_prompts": 512,
        "eval_temperature": 0.0,
        "print_sample_output_freq": None,
        "eta": 1.0,
        "noptepochs": 4,
        "kl_coef": 0.05,
        "adaptive_kl_target": None,
        "adaptive_kl_horizon": 10000,
        "penalty_reward_value": -10.0,
        "whiten_rewards": False,
        "learning_rate": 3e-7,
        "weight_decay": 1e-6,
        "adam_epsilon": 1e-8,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    plan = config.plan_batches(8)
    assert (plan.global_batch, plan.global_rollout, plan.updates_per_rollout) == (8, 8, 4)


def test_evaluations_of_refuel_are_counted_in_rounds():
    words = [*SFT, "--reward_model", "r", "--print_sample_output_freq", "200"]
    assert parse(RefuelOnlineConfig, words).eval_interval == 800
    assert parse(RefuelOnlineConfig, [*words, "--noptepochs", "1"]).eval_interval == 200


def test_values_that_follow_from_other_flags():
    config = parse(PPOConfig, PPO + ["--bf16"])
    assert (config.dtype, config.reward_model_name_or_path) == ("bf16", "c")
    assert config.tensorboard_path == "out/tensorboard"
    assert parse(PPOConfig, PPO + ["--bf16", "--dtype", "bf16"]).dtype == "bf16"
    base = {"data_path": ["a"], "output_dir": "o", "actor_model_name_or_path": "a"}
    config = PPOConfig(**base, zero_stage=2, lora_dim=8, critic_zero_stage=0, actor_lora_dim=4)
    assert (config.actor_zero_stage, config.critic_zero_stage) == (2, 0)
    assert (config.actor_lora_dim, config.critic_lora_dim) == (4, 8)


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
    config = parse(PPOConfig, [*PPO, *flags.split()])
    assert (config.actor_gradient_checkpointing, config.critic_gradient_checkpointing) == (actor, critic)


def test_reward_function_needs_neither_critic_nor_reward_model():
    config = parse(PPOConfig, [*COMMON, "--actor_model_name_or_path", "a", "--reward_function", "score.py:f"])
    assert (config.critic_model_name_or_path, config.reward_model_name_or_path) == (None, None)


def test_ngram_is_a_number_or_infinite():
    lengths = [parse(PPOConfig, PPO + ["--ngram", text]).ngram for text in ("1", "10", "inf")]
    assert lengths == [1, 10, math.inf]
    assert isinstance(lengths[1], int)


def test_metric_name_is_the_name_of_the_function():
    assert parse(PPOConfig, PPO).metric_name is None
    assert parse(PPOConfig, PPO + ["--metric_function", "score.py:f"]).metric_name == "f"


def test_warmup_updates():
    assert parse(SFTConfig, SFT).warmup_updates(145) == 0
    assert parse(SFTConfig, SFT + ["--num_warmup_steps", "6"]).warmup_updates(145) == 6
    assert parse(SFTConfig, SFT + ["--warmup_ratio", "0.1"]).warmup_updates(145) == 15
