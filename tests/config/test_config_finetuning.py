# SPDX-License-Identifier: Apache-2.0
"""What is trained, in each step: modes, and ranks that follow from them."""

import pytest

from flag_cases import config_of


@pytest.mark.parametrize("step", ["sft", "reward", "dpo", "ppo", "refuel"])
def test_what_a_mode_trains(step):
    def of(flags):
        config = config_of(step, flags)
        return [config.finetuning.arguments(rank) for rank in config.lora_ranks]

    adapters = {"targets": None, "alpha": None, "dropout": 0.0}
    both = 2 if step == "ppo" else 1
    assert of("") == of("--finetune_mode all") == [{"last_layer": False}] * both
    assert of("--finetune_mode last_layer") == [{"last_layer": True}] * both
    assert of("--finetune_mode lora") == of("--lora_dim 8") == [{**adapters, "rank": 8}] * both
    flags = "--finetune_mode lora --lora_dim 4 --lora_alpha 2 --lora_module_name q_proj v_proj"
    assert of(flags) == [{"rank": 4, "targets": ("q_proj", "v_proj"), "alpha": 2, "dropout": 0.0}] * both


def test_one_model_of_step_3_with_adapters_leaves_the_other_whole():
    assert config_of("ppo", "--finetune_mode lora --critic_lora_dim 0").lora_ranks == [8, 0]


@pytest.mark.parametrize("step", ["sft", "reward", "dpo"])
def test_dropout_in_steps_1_and_2(step):
    assert config_of(step, "--lora_dim 4 --lora_dropout 0.1").finetuning.arguments(4)["dropout"] == 0.1
