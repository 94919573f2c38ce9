# SPDX-License-Identifier: Apache-2.0
"""The first updates of step 3 train the critic alone (--critic_warmup_updates)."""

import pytest
import torch

from dschat.base.errors import UserError
from dschat.run.distributed import rank, world_size
from factories import make_causal_lm, make_classifier, make_prompts, ppo_config, ppo_loop, whole_state
from flag_cases import REQUIRED, RLOO, config_of, refusal
from resume_runs import Setup, lengths, ppo
from shared_base_runs import trainer_of, write_adapter, write_base

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


@pytest.mark.parametrize("flags", [SEVERAL, FUSED], ids=["several updates", "fused"])
def test_the_critic_learns_what_it_learns_beside_an_actor_at_rest(flags, group, tmp_path):
    """With a learning rate of 0, the actor is trained and does not move: the critic's weights are the same."""
    sizes = {"per_device_training_batch_size": 4, "ppo_epochs": 2 if flags is SEVERAL else 1, "kl_coef": 0.1}
    states = []
    for name, more in (("alone", {"critic_warmup_updates": 4}), ("beside", {"actor_learning_rate": 0.0})):
        config = ppo_config(tmp_path / name, **sizes, **more)
        loop = ppo_loop(config, lengths, make_prompts(8), reference=make_causal_lm(seed=1), critic=make_classifier())
        loop.iterate(work_of_rank(8))
        states.append(whole_state(loop.algorithm.models.critic))
    assert are_equal(*states)


def test_the_actors_schedule_begins_after_the_warm_up(group, tmp_path):
    """A linear schedule over 4 updates of a peak of 1e-3, after two updates of the critic."""
    setup = Setup(options={"schedule": "linear", "total_updates": 4})
    loop = ppo(tmp_path, setup=setup, reward=lengths, **FUSED)
    rates = [loop.iterate(work_of_rank(4)).get("lr/actor") for _ in range(4)]
    assert rates == [None, None, pytest.approx(1e-3), pytest.approx(0.75e-3)]


@pytest.mark.parametrize(
    "flags",
    [{}, pytest.param({"ppo_epochs": 1, "zero_stage": 3}, marks=pytest.mark.slow)],
    ids=["stage 0", "stage 3, one epoch"],
)
def test_with_a_shared_base(flags, group, tokenizer, tmp_path):
    base = write_base(tmp_path, tokenizer)
    adapter = write_adapter(tmp_path / "reward", base, tokenizer)
    models = {"critic_model_name_or_path": adapter, "reward_model_name_or_path": adapter}
    loop = trainer_of(tmp_path / "out", base, tokenizer, critic_warmup_updates=4, **(models | flags))
    engines = loop.algorithm.models.actor, loop.algorithm.models.critic
    actor, critic = map(whole_state, engines)
    loop.iterate(work_of_rank(8))
    warm_actor, warm_critic = map(whole_state, engines)
    assert are_equal(warm_actor, actor) and not are_equal(warm_critic, critic)


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_without_a_critic_it_is_refused(estimator):
    words = [*RLOO, "--reward_model_name_or_path", "r"]
    words[words.index("rloo")] = estimator
    message = refusal("ppo", "--critic_warmup_updates 4", words)
    assert message == f"--critic_warmup_updates 4: --advantage_estimator {estimator} has no critic. Drop the flag."


def test_the_actors_first_update_begins_a_rollout():
    """16 prompts, two epochs of two updates of 8."""
    sizes = "--ppo_epochs 2 --per_device_training_batch_size 8 --critic_warmup_updates"
    assert "a rollout makes 4 optimiser updates" in refusal("ppo", f"{sizes} 6")
    assert refusal("ppo", f"{sizes} 6").endswith("make it 4.")
    config_of("ppo", f"{sizes} 8").plan_batches(1)


def test_a_run_that_never_trains_the_actor_is_refused():
    config = config_of("ppo", "--critic_warmup_updates 4 --max_steps 4", REQUIRED["ppo"])
    with pytest.raises(UserError, match="the run makes 4 updates, so the actor would never be trained"):
        config.total_updates(1000, config.plan_batches(1))
