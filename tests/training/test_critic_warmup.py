# SPDX-License-Identifier: Apache-2.0
"""The first updates of step 3 train the critic alone (--critic_warmup_updates)."""

import pytest
import torch

from dschat.run.distributed import rank, world_size
from factories import whole_state
from resume_runs import Setup, lengths, ppo

SEVERAL = {"critic_warmup_updates": 8}  # rollouts of 8 prompts and 4 updates
FUSED = {"critic_warmup_updates": 2, "ppo_epochs": 1, "generation_batches": 1}  # of 4 prompts and one update
SETUPS = {
    "plain": Setup(),
    **{f"ZeRO {stage}": Setup(zero_stage=stage) for stage in (1, 2, 3)},
    "adapters": Setup(lora_dim=2),
}
OF_THE_ACTOR = {"loss/policy", "lr/actor", "grad_norm/actor", "policy/entropy", "policy/approxkl", "val/ratio"}


def work_of_rank(size):
    share = size // world_size()
    return [list(range(size))[rank() * share : (rank() + 1) * share]]


def are_equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("flags", [SEVERAL, FUSED], ids=["several updates", "fused"])
@pytest.mark.parametrize(
    "name", [name if name in ("plain", "ZeRO 3") else pytest.param(name, marks=pytest.mark.slow) for name in SETUPS]
)
def test_the_actor_stays_to_the_bit_and_moves_afterwards(name, flags, group, tmp_path):
    loop = ppo(tmp_path, setup=SETUPS[name], reward=lengths, **flags)
    algorithm = loop.algorithm
    assert algorithm.config.credit_is_fused(algorithm.plan) is (flags is FUSED)
    engines = algorithm.models.actor, algorithm.models.critic
    actor, critic = map(whole_state, engines)
    coefficient = algorithm.kl.value
    work = work_of_rank(algorithm.plan.global_rollout)
    for _ in range(2):
        metrics = loop.iterate(work)
        assert metrics["val/critic_warmup"] == algorithm.plan.updates_per_rollout
        assert not OF_THE_ACTOR & metrics.keys() and metrics["loss/value"] > 0 and metrics["lr/critic"] > 0
        last_critic = critic
        warm_actor, critic = map(whole_state, engines)
        assert are_equal(warm_actor, actor) and not are_equal(critic, last_critic)
    assert algorithm.kl.value == coefficient and are_equal(whole_state(algorithm.average), actor)
    metrics = loop.iterate(work)
    assert OF_THE_ACTOR <= metrics.keys() and "val/critic_warmup" not in metrics
    trained_actor, trained_critic = map(whole_state, engines)
    assert not are_equal(trained_actor, actor) and not are_equal(trained_critic, critic)
    assert algorithm.kl.value != coefficient
