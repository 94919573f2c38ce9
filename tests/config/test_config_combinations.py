# SPDX-License-Identifier: Apache-2.0
"""Flags that need another one beside them: the message names it."""

import pytest

from dschat.config.parse import parse
from dschat.config.ppo import PPOConfig
from dschat.config.supervised import RewardConfig, SFTConfig
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--parser chunker", "--parser: of no effect without --termination_condition parsing"),
        ("--parser_cutoff 4 --parser_device cuda", "--parsing_cutoff, --parser_device: of no effect without"),
        ("--termination_condition parsing --parser chunker --parser_device cuda:1", "only benepar uses it"),
        ("--termination_condition parsing --parser chunker", None),
        ("--termination_condition parsing --parser_device cuda:1", None),
    ],
)
def test_flags_of_a_parser_that_does_nothing_with_them_warn(flags, message, caplog):
    parse(PPOConfig, [*PPO, *flags.split()])
    assert [message in record.getMessage() for record in caplog.records] == ([True] if message else [])


@pytest.mark.parametrize("config_class", [SFTConfig, RewardConfig])
def test_offload_needs_zero(config_class):
    assert "--offload needs ZeRO" in _refusal(config_class, [*SFT, "--offload"])
    assert parse(config_class, [*SFT, "--offload", "--zero_stage", "1"]).offload


def test_offload_needs_zero_for_actor_and_critic():
    flags = [*PPO, "--offload", "--zero_stage", "2", "--critic_zero_stage", "0"]
    assert "both actor and critic" in _refusal(PPOConfig, flags)
    assert parse(PPOConfig, [*PPO, "--offload", "--actor_zero_stage", "3", "--critic_zero_stage", "1"]).offload


def test_layer_names_without_adapters_warn(caplog):
    parse(SFTConfig, [*SFT, "--lora_module_name", "q_proj"])
    assert len(caplog.records) == 1
    assert "--lora_module_name does nothing without --lora_dim" in caplog.records[0].getMessage()


@pytest.mark.parametrize("flag", ["--lora_alpha 4", "--lora_dropout 0.1"])
def test_other_flags_of_adapters_without_adapters_warn(flag, caplog):
    parse(SFTConfig, [*SFT, *flag.split()])
    assert f"{flag.split()[0]} does nothing without --lora_dim" in caplog.records[0].getMessage()
    caplog.clear()
    parse(SFTConfig, [*SFT, *flag.split(), "--finetune_mode", "lora"])
    assert not caplog.records


def test_adapter_only_without_adapters_warns(caplog):
    parse(PPOConfig, [*PPO, "--no_merge_lora"])
    assert "--no_merge_lora does nothing without --lora_dim" in caplog.records[0].getMessage()
    caplog.clear()
    parse(PPOConfig, [*PPO, "--no_merge_lora", "--actor_lora_dim", "4"])
    assert not caplog.records


@pytest.mark.parametrize("loss", ["last_token", "average", "per_sample", "end"])
def test_losses_that_leave_the_score_of_step_3_untrained_warn(loss, caplog):
    parse(RewardConfig, [*SFT, "--reward_loss", loss])
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (loss in ("last_token", "average"))
    assert all(f"--reward_loss {loss} does not train the number" in message for message in messages)


def test_the_parsers_are_those_of_the_package():
    from constituent_treelib.parsing import NAMES
    from dschat.config.macro_actions import PARSERS

    assert PARSERS == NAMES
