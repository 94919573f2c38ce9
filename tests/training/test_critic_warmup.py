# SPDX-License-Identifier: Apache-2.0
"""The first updates of step 3 train the critic alone (--critic_warmup_updates)."""

import pytest

from factories import largest_difference, whole_state
from resume_runs import Setup, lengths, ppo

SEVERAL = {"critic_warmup_updates": 8}  # rollouts of 8 prompts and 4 updates
FUSED = {"critic_warmup_updates": 2, "ppo_epochs": 1, "generation_batches": 1}  # of 4 prompts and one update
OF_THE_ACTOR = {"loss/policy", "lr/actor", "grad_norm/actor", "policy/entropy", "policy/approxkl", "val/ratio"}


@pytest.mark.parametrize(
    ("setup", "flags"),
    [
        (Setup(), SEVERAL),
        (Setup(zero_stage=3), FUSED),
        pytest.param(Setup(lora_dim=2), SEVERAL, marks=pytest.mark.slow),
    ],
    ids=["several updates", "ZeRO 3 and fused", "adapters"],
)
def test_the_actor_stays_to_the_bit_and_moves_afterwards(setup, flags, group, tmp_path):
    loop = ppo(tmp_path, setup=setup, reward=lengths, **flags)
    algorithm = loop.algorithm
    assert algorithm.config.credit_is_fused(algorithm.plan) is (flags is FUSED)
    engines = algorithm.models.actor, algorithm.models.critic
    actor, critic = map(whole_state, engines)
    coefficient = algorithm.kl.value
    work = [list(range(algorithm.plan.global_rollout))]
    for _ in range(2):
        metrics = loop.iterate(work)
        assert metrics["val/critic_warmup"] == algorithm.plan.updates_per_rollout
        assert not OF_THE_ACTOR & metrics.keys() and metrics["loss/value"] > 0 and metrics["lr/critic"] > 0
        last_critic = critic
        warm_actor, critic = map(whole_state, engines)
        assert largest_difference(warm_actor, actor) == 0 < largest_difference(critic, last_critic)
    assert algorithm.kl.value == coefficient and largest_difference(whole_state(algorithm.average), actor) == 0
    metrics = loop.iterate(work)
    assert OF_THE_ACTOR <= metrics.keys() and "val/critic_warmup" not in metrics
    trained_actor, trained_critic = map(whole_state, engines)
    assert largest_difference(trained_actor, actor) > 0 and largest_difference(trained_critic, critic) > 0
    assert algorithm.kl.value != coefficient
