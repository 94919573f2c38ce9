# SPDX-License-Identifier: Apache-2.0
"""What this version refuses: the message names the flag to drop."""

import pytest

from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.config.reward import RewardConfig
from dschat.config.sft import SFTConfig
from dschat.errors import UserError

COMMON = ["--data_path", "rows.jsonl", "--output_dir", "out"]
SFT = [*COMMON, "--model_name_or_path", "m"]
PPO = [*COMMON, "--actor_model_name_or_path", "a", "--critic_model_name_or_path", "c"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in a folder of its own, as a single process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def _refusal(config_class, arguments):
    with pytest.raises(UserError) as refusal:
        parse(config_class, arguments)
    return str(refusal.value)


@pytest.mark.parametrize("config_class", [SFTConfig, RewardConfig])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--zero_stage 2", ["--zero_stage 2", "one process at ZeRO stage 0", "drop --zero_stage"]),
        ("--offload", ["--offload is", "one process at ZeRO stage 0", "drop --offload"]),
        ("--lora_dim 8", ["--lora_dim 8", "drop --lora_dim"]),
    ],
)
def test_refusals_of_steps_1_and_2(config_class, flags, words):
    message = _refusal(config_class, SFT + flags.split(" "))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--termination_condition parsing",
            [
                "--termination_condition parsing needs the constituency parsers, which this version does not include;"
                " use fixed, randomized, ppl or module.py:function"
            ],
        ),
        *[
            (f"--{name} 1", [f"--{name} 1", "one process at ZeRO stage 0", f"drop --{name}"])
            for name in ("zero_stage", "actor_zero_stage", "critic_zero_stage", "actor_lora_dim", "critic_lora_dim")
        ],
        ("--zero_stage 3 --actor_zero_stage 0 --critic_zero_stage 0", ["--zero_stage 3", "drop --zero_stage"]),
        ("--offload_reference_model", ["--offload_reference_model is", "drop --offload_reference_model"]),
        ("--enable_ema", ["--enable_ema is", "drop --enable_ema"]),
    ],
)
def test_refusals_of_step_3(flags, words):
    message = _refusal(PPOConfig, PPO + flags.split(" "))
    assert all(word in message for word in words), message


def test_layer_names_without_adapters_warn(caplog):
    parse(SFTConfig, [*SFT, "--lora_module_name", "q_proj"])
    assert len(caplog.records) == 1
    assert "--lora_module_name does nothing without --lora_dim" in caplog.records[0].getMessage()


def test_several_processes_are_refused_with_the_launcher_flag(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = _refusal(SFTConfig, SFT)
    assert "2 processes" in message
    assert "--num_gpus 1" in message
