# SPDX-License-Identifier: Apache-2.0
"""Configurations made from command lines: `config_of` returns one, `refusal` the message of one that is refused."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from dschat.base.errors import UserError
from dschat.refuel.offline_settings import RefuelConfig
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.settings.parse import parse
from dschat.settings.parser import FlagParser
from dschat.settings.ppo import PPOConfig
from dschat.settings.supervised import DPOConfig, RewardConfig, SFTConfig

FAMILIES: dict[str, type[Any]] = {
    "sft": SFTConfig,
    "reward": RewardConfig,
    "dpo": DPOConfig,
    "refuel": RefuelConfig,
    "online": RefuelOnlineConfig,
    "ppo": PPOConfig,
}
COMMON = ["--data_path", "rows.jsonl", "--output_dir", "out"]
ACTOR = [*COMMON, "--actor_model_name_or_path", "a"]
REQUIRED = dict.fromkeys(FAMILIES, [*COMMON, "--model_name_or_path", "m"]) | {
    "online": [*COMMON, "--model_name_or_path", "m", "--reward_model", "r"],
    "ppo": [*ACTOR, "--critic_model_name_or_path", "c"],
}
# Step 3 without a critic, as lists of words: with no source of scores yet, and with a reward model.
RLOO = [*ACTOR, "--advantage_estimator", "rloo", "--samples_per_prompt", "4"]
SCORED = [*RLOO, "--reward_model_name_or_path", "r"]


def config_of(step: str, flags: str | Sequence[str] = "", required: Sequence[str] | None = None) -> Any:
    """The shortest command line of a step, or another one, with further flags: its configuration."""
    words = flags.split(" ") if isinstance(flags, str) else flags
    words = [word for word in words if word]
    required = REQUIRED[step] if required is None else required
    return parse(FAMILIES[step], [*_without(step, required, words), *words])


def _without(step: str, required: Sequence[str], words: Sequence[str]) -> list[str]:
    """The required flags, each followed by one value, but for those that the further words give."""
    actions = FlagParser(FAMILIES[step])._option_string_actions
    named = [actions.get(word.partition("=")[0]) for word in words]
    fields = {action.dest for action in named if action is not None}
    kept = [number for number in range(0, len(required), 2) if actions[required[number]].dest not in fields]
    return [word for number in kept for word in required[number : number + 2]]


def refusal(step: str, flags: str | Sequence[str] = "", required: Sequence[str] | None = None) -> str:
    """The message, of one line, with which such a command line or its batches are refused."""
    with pytest.raises(UserError) as refused:
        config_of(step, flags, required).plan_batches(int(os.environ.get("WORLD_SIZE", "1")))
    message = str(refused.value)
    assert "\n" not in message
    return message
