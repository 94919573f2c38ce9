# SPDX-License-Identifier: Apache-2.0
"""One base in memory for all models of step 3 (--share_base)."""

import pytest
import torch

from factories import largest_difference
from shared_base_runs import separate_trainer_of, storages, trainer_of, two_updates, write_adapter, write_base

STAGES = [{}, {"zero_stage": 1}, {"zero_stage": 2}, {"actor_zero_stage": 2, "critic_zero_stage": 0}]
FORMS = [
    {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True},
    {"ppo_epochs": 1},
    {"advantage_estimator": "rloo", "samples_per_prompt": 2, "per_device_generation_batch_size": 4},
    {"critic_lora_dim": 3, "critic_model_name_or_path": None},
]


def paths(folder, tokenizer, kind="gemma"):
    base = write_base(folder, tokenizer, kind)
    adapter = write_adapter(folder / "reward", base, tokenizer)
    return base, {"critic_model_name_or_path": adapter, "reward_model_name_or_path": adapter}


def both(monkeypatch, tmp_path, tokenizer, base, flags):
    flags = {name: value for name, value in flags.items() if value is not None}
    shared = trainer_of(tmp_path / "shared", base, tokenizer, **flags)
    other = separate_trainer_of(monkeypatch, tmp_path / "separate", base, tokenizer, **flags)
    return shared, other


@pytest.mark.parametrize("flags", [*STAGES, *FORMS], ids=str)
def test_updates_are_those_of_separate_models(flags, group, tokenizer, tmp_path, monkeypatch):
    base, models = paths(tmp_path, tokenizer)
    if "advantage_estimator" in flags:
        models["critic_model_name_or_path"] = None
    shared, other = both(monkeypatch, tmp_path, tokenizer, base, models | flags)
    kept = storages(shared.models.actor.module.inner)
    before = {name: p.detach().clone() for name, p in shared.models.actor.module.inner.named_parameters()}
    for model in (shared.models.critic, shared.models.reward.model):
        if model is not None:
            own = storages(model.module.inner)
            assert own and own.items() <= kept.items()
    assert (
        not storages(other.models.reward.model.module.inner).items()
        <= storages(other.models.actor.module.inner).items()
    )
    found, expected = two_updates(shared), two_updates(other)
    assert found[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-5)
    assert largest_difference(found[0], expected[0]) < 1e-5
    moved = {name: not torch.equal(p, before[name]) for name, p in shared.models.actor.module.inner.named_parameters()}
    assert all(".lora_" in name for name, changed in moved.items() if changed) and any(moved.values())
