# SPDX-License-Identifier: Apache-2.0
"""RLHF with macro actions: SFT, reward model and PPO on DeepSpeed.

    from dschat import PPOConfig, train

    train(PPOConfig(data_path=["rows.jsonl"], actor_model_name_or_path="sft", critic_model_name_or_path="reward",
                    output_dir="ppo"))

Parts for a training loop of your own: `dschat.models`, `dschat.rollouts`, `macro_actions`; see examples/own_loop.py.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dschat.cli import train
    from dschat.refuel.offline_settings import RefuelConfig
    from dschat.refuel.online_settings import RefuelOnlineConfig
    from dschat.settings.ppo import PPOConfig
    from dschat.settings.supervised import DPOConfig, RewardConfig, SFTConfig

__all__ = ["DPOConfig", "PPOConfig", "RefuelConfig", "RefuelOnlineConfig", "RewardConfig", "SFTConfig", "train"]
# Configuration → its module of dschat.
_MODULES = {
    "DPOConfig": "settings.supervised",
    "PPOConfig": "settings.ppo",
    "RefuelConfig": "refuel.offline_settings",
    "RefuelOnlineConfig": "refuel.online_settings",
    "RewardConfig": "settings.supervised",
    "SFTConfig": "settings.supervised",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used, so that `import dschat` is quick."""
    from importlib import import_module

    if name == "train":
        return import_module("dschat.cli").train
    if name in _MODULES:
        module = import_module(f"dschat.{_MODULES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'dschat' has no attribute {name!r}")
