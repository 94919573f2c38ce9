# SPDX-License-Identifier: Apache-2.0
"""Default values, and values that follow from other flags."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelConfig, RefuelOnlineConfig
from dschat.config.rules import flags_on_resume
from dschat.config.supervised import DPOConfig, RewardConfig, SFTConfig

COMMON = ["--data_path", "rows.jsonl", "--output_dir", "out"]
SFT = [*COMMON, "--model_name_or_path", "m"]
FAMILIES = {
    SFTConfig: "sft",
    RewardConfig: "reward",
    DPOConfig: "dpo",
    RefuelConfig: "refuel",
    RefuelOnlineConfig: "online",
    PPOConfig: "ppo",
}
PPO = [*COMMON, "--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in a folder of its own, as a single process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "score.py").write_text("def f(prompts, responses, rows): ...\n")


def declared(field) -> str:
    """A flag's default and further spellings."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    shown = "required" if default is dataclasses.MISSING else repr(default)
    return " ".join([shown, *field.metadata["aliases"]])


def test_the_table_of_flags_and_defaults():
    """flags.txt: each flag's default, and where a step has another one; a change of it is a change for every user."""
    found = {}
    for config_class in FAMILIES:
        for field in dataclasses.fields(config_class):
            found.setdefault(field.name, {}).setdefault(declared(field), []).append(FAMILIES[config_class])
    lines = []
    for name, defaults in sorted(found.items()):
        lines += [f"{name}: {default} ({' '.join(steps)})" for default, steps in defaults.items()]
    assert lines == (Path(__file__).parent / "flags.txt").read_text(encoding="utf-8").splitlines()


def test_what_a_resume_may_change_is_what_the_document_says():
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = text.split("## What may change between two parts of a run")[1].split("Everything else")[0]
    free, shares = section.split("On another\nnumber of processes")
    kinds = {"free": set(), "share": set()}
    for config_class in FAMILIES:
        for kind, names in kinds.items():
            names |= flags_on_resume(config_class, kind)
    assert set(re.findall(r"`--(\w+)`", free)) == kinds["free"] | {"reward_url"}
    assert set(re.findall(r"`--(\w+)`", shares)) == kinds["share"]


def test_defaults_of_refuel_are_the_published_run():
    config = parse(RefuelConfig, SFT)
    expected = {"learning_rate": 3e-7, "weight_decay": 1e-6, "eta": 1000, "temperature": 0.8, "max_seq_len": 2048}
    expected |= {"total_episodes": 64000, "warmup_ratio": 0.1, "lr_scheduler_type": "cosine", "seed": 555134}
    expected |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 16}
    expected |= {"eval_interval": 100, "gradient_clipping": 0, "optimizer": "adamw", "start_idx": 0, "end_idx": -1}
    expected |= {"cluster": None, "eval_iters": 0}
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.plan_batches(8).global_batch == 128
    assert config.total_iterations(per_epoch=499, size=128) == 500


def test_what_follows_from_refuels_flags():
    assert parse(RefuelConfig, [*SFT, "--optimizer", "adam"]).weight_decay == 0
    assert parse(RefuelConfig, [*SFT, "--num_warmup_steps", "3"]).warmup_ratio is None
    config = parse(RefuelConfig, [*SFT, "--global_batch_size", "6"])
    assert config.plan_batches(2).accumulation == 3
    epochs = parse(RefuelConfig, [*SFT, "--total_episodes", "0", "--num_train_epochs", "3"])
    assert epochs.total_iterations(per_epoch=7, size=10) == 21
    assert parse(RefuelConfig, [*SFT, "--total_episodes", "3"]).total_iterations(7, 10) == 1


def test_a_round_of_refuel_is_one_batch():
    plan = parse(RefuelOnlineConfig, [*SFT, "--reward_model", "r"]).plan_batches(8)
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
