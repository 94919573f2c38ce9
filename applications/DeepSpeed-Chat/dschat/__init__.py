# SPDX-License-Identifier: Apache-2.0
"""RLHF with macro actions: SFT, reward model and PPO on DeepSpeed.

    from dschat import PPOConfig, train

    train(PPOConfig(data_path=["rows.jsonl"], actor_model_name_or_path="sft", critic_model_name_or_path="reward",
                    output_dir="ppo"))

The parts, for a loop of one's own: `dschat.models`, `dschat.rollouts`, `macro_actions`; see examples/own_loop.py.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dschat.cli import train
    from dschat.settings.ppo import PPOConfig
    from dschat.settings.refuel import RefuelConfig, RefuelOnlineConfig
    from dschat.settings.supervised import DPOConfig, RewardConfig, SFTConfig

__all__ = ["DPOConfig", "PPOConfig", "RefuelConfig", "RefuelOnlineConfig", "RewardConfig", "SFTConfig", "train"]
_PLACES = {
    "PPOConfig": "ppo",
    "RefuelConfig": "refuel",
    "RefuelOnlineConfig": "refuel",
    **dict.fromkeys(("DPOConfig", "RewardConfig", "SFTConfig"), "supervised"),
}


def __getattr__(name: str) -> object:
    """Imports what is asked for, so that `import dschat` is quick."""
    from importlib import import_module

    if name == "train":
        return import_module("dschat.cli").train
    if name in _PLACES:
        return getattr(import_module(f"dschat.settings.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'dschat' has no attribute {name!r}")
