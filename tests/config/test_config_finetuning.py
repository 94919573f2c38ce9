# SPDX-License-Identifier: Apache-2.0
"""What is trained, in each step: modes, ranks that follow from them, and what contradicts them."""

import pytest

from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelConfig, RefuelOnlineConfig
from dschat.config.supervised import DPOConfig, RewardConfig, SFTConfig
from dschat.errors import UserError

COMMON = ["--data_path", "rows.jsonl", "--output_dir", "out"]
ONE = [*COMMON, "--model_name_or_path", "m"]
PPO = [*COMMON, "--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]
ONLINE = [*ONE, "--reward_model", "r"]
EVERY = {SFTConfig: ONE, RewardConfig: ONE, DPOConfig: ONE, PPOConfig: PPO, RefuelConfig: ONE}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("config_class", EVERY)
def test_what_a_mode_trains(config_class):
    def of(*flags):
        config = parse(config_class, [*EVERY[config_class], *flags])
        return [config.finetuning(rank) for rank in config.lora_ranks]

    both = 2 if config_class is PPOConfig else 1
    assert of() == of("--finetune_mode", "all") == [(False, 0, None, None, 0.0)] * both
    assert of("--finetune_mode", "last_layer") == [(True, 0, None, None, 0.0)] * both
    assert of("--finetune_mode", "lora") == of("--lora_dim", "8") == [(False, 8, None, None, 0.0)] * both
    flags = [
        "--finetune_mode",
        "lora",
        "--lora_dim",
        "4",
        "--lora_alpha",
        "2",
        "--lora_module_name",
        "q_proj",
        "v_proj",
    ]
    assert of(*flags) == [(False, 4, ("q_proj", "v_proj"), 2, 0.0)] * both


def test_one_model_of_step_3_with_adapters_leaves_the_other_whole():
    config = parse(PPOConfig, [*PPO, "--finetune_mode", "lora", "--critic_lora_dim", "0"])
    assert config.lora_ranks == [8, 0]
    with pytest.raises(UserError, match="--finetune_mode lora: no model has adapters"):
        parse(PPOConfig, [*PPO, "--finetune_mode", "lora", "--critic_lora_dim", "0", "--actor_lora_dim", "0"])
    with pytest.raises(UserError, match="--finetune_mode all and --lora_dim both"):
        parse(PPOConfig, [*PPO, "--finetune_mode", "all", "--critic_lora_dim", "2"])


@pytest.mark.parametrize("config_class", [SFTConfig, RewardConfig, DPOConfig])
def test_dropout_in_steps_1_and_2(config_class):
    config = parse(config_class, [*ONE, "--lora_dim", "4", "--lora_dropout", "0.1"])
    assert config.finetuning(4)[-1] == 0.1


@pytest.mark.parametrize(
    ("config_class", "flags"), [(PPOConfig, PPO), (RefuelConfig, ONE), (RefuelOnlineConfig, ONLINE)]
)
def test_no_dropout_where_log_probs_are_compared_with_earlier_ones(config_class, flags):
    with pytest.raises(UserError, match="--lora_dropout 0.1: .* differ before anything is learnt. Drop the flag"):
        parse(config_class, [*flags, "--lora_dim", "4", "--lora_dropout", "0.1"])


def test_top_layers_and_a_mode_contradict_each_other():
    with pytest.raises(UserError, match="--trained_layers and --finetune_mode last_layer both"):
        parse(RefuelOnlineConfig, [*ONLINE, "--trained_layers", "2", "--finetune_mode", "last_layer"])
