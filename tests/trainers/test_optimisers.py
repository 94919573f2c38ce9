# SPDX-License-Identifier: Apache-2.0
"""Which flags each model's optimiser and schedule get."""

from types import SimpleNamespace
from typing import Any

import pytest

from dschat.builders.engines import build_policy, build_reward_model
from dschat.builders.ppo import build_ppo_models
from dschat.config.supervised import RewardConfig, SFTConfig
from dschat.engine.engine import OptimizerSettings
from factories import ppo_config, replace_in_builders


@pytest.fixture
def optimisers(monkeypatch: pytest.MonkeyPatch) -> list[OptimizerSettings]:
    """The optimisers of the engines in the order in which they are made; nothing is loaded."""
    found: list[OptimizerSettings] = []
    replace_in_builders(monkeypatch, "train_engine", lambda model, optimizer, settings: found.append(optimizer))
    for name in ("load_causal_lm", "load_scalar", "PolicyModel", "ScalarModel", "frozen_engine", "end_token_id"):
        replace_in_builders(monkeypatch, name, lambda *_, **__: None)
    for name in (
        "function_scores",
        "_rollout_engine",
        "choose_trained",
        "lora_config",
        "own_end_ids",
        "seed_new_rows",
        "note_reward_loss",
    ):
        replace_in_builders(monkeypatch, name, lambda *_, **__: None)
    return found


SHARED = {"lr_scheduler_type": "cosine", "gradient_clipping": 0.5}


def test_actor_and_critic_have_optimisers_of_their_own(optimisers: list[OptimizerSettings], tmp_path: Any) -> None:
    own = {"actor_learning_rate": 1e-3, "actor_weight_decay": 0.1}
    own |= {"critic_learning_rate": 2e-3, "critic_weight_decay": 0.2}
    config = ppo_config(tmp_path, num_warmup_steps=3, **(own | SHARED))
    build_ppo_models(config, config.plan_batches(1), SimpleNamespace(), 20)
    assert optimisers == [
        OptimizerSettings(1e-3, 0.1, 20, 3, "cosine", 0.5),
        OptimizerSettings(2e-3, 0.2, 20, 3, "cosine", 0.5),
    ]


@pytest.mark.parametrize(("build", "flags"), [(build_policy, SFTConfig), (build_reward_model, RewardConfig)])
def test_steps_1_and_2(build: Any, flags: Any, optimisers: list[OptimizerSettings], tmp_path: Any) -> None:
    """A warm-up of 15 % of 10 updates is 2 updates."""
    names = {"data_path": ["unused"], "output_dir": str(tmp_path), "model_name_or_path": "unused"}
    config = flags(learning_rate=3e-3, weight_decay=0.3, warmup_ratio=0.15, **(names | SHARED))
    build(config, config.plan_batches(1), SimpleNamespace(), 10)
    assert optimisers == [OptimizerSettings(3e-3, 0.3, 10, 2, "cosine", 0.5)]
