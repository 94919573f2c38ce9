# SPDX-License-Identifier: Apache-2.0
"""A critic with more updates than the actor (--critic_minibatches, --critic_epochs). Resume: test_resume.py."""

import numpy as np
import pytest

from closeness import UPDATE, WEIGHT_GAP, near
from critic_updates import critic_updates, holed_batch, plain_critic, rows_of_critic
from dschat.base.errors import UserError
from dschat.training.ppo.update import updates_after_steps, updates_of_rollout
from factories import largest_difference, ppo_config, update_flags
from nonfinite_cases import batches, spoiled, trainer_for


def steps_of(epochs=1, critic_alone=False, **flags):
    """Which models each step trains, and how many rows it takes, of eight rows in updates of four."""
    config, plan = update_flags(4, 4, epochs, **flags)
    updates = updates_of_rollout(8, plan, config, 0, critic_alone)
    return [("A" * u.trains_actor + "C" * u.trains_critic, len(u.rows)) for u in updates], updates


BOTH, ACTOR, CRITIC, HALF = ("AC", 4), ("A", 4), ("C", 4), ("C", 2)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({}, [BOTH, BOTH]),
        ({"epochs": 2}, [BOTH] * 4),
        ({"epochs": 2, "critic_alone": True}, [CRITIC] * 4),
        ({"critic_epochs": 3}, [CRITIC] * 4 + [BOTH] * 2),
        ({"epochs": 2, "critic_epochs": 1}, [ACTOR] * 2 + [BOTH] * 2),
        ({"critic_minibatches": 2}, [HALF, HALF, ACTOR] * 2),
        ({"critic_minibatches": 2, "critic_epochs": 2}, [HALF] * 4 + [HALF, HALF, ACTOR] * 2),
        ({"critic_minibatches": 2, "critic_alone": True}, [HALF] * 4),
        ({"critic_minibatches": 2, "critic_epochs": 2, "advantage_estimator": "rloo"}, [ACTOR] * 2),
    ],
    ids=str,
)
def test_steps_of_a_rollout(flags, steps):
    found, updates = steps_of(**flags)
    assert found == steps
    for letter in "AC":  # every pass takes each row once
        rows = [u.rows for u, (trained, _) in zip(updates, found, strict=True) if letter in trained]
        if rows:
            passes = np.concatenate(rows).reshape(-1, 8)
            assert (np.sort(passes) == np.arange(8)).all()


def test_updates_of_the_run_are_the_actors(tmp_path):
    """Two updates of four rows: after each step as many count as the actor has made; in a warm-up shares of them."""
    cases = (
        ({"critic_minibatches": 2}, 2, [0, 0, 1, 1, 1, 2]),
        ({"epochs": 2, "critic_epochs": 1}, 4, [1, 2, 3, 4]),
        ({"critic_epochs": 3}, 2, [0, 0, 0, 0, 1, 2]),
        ({"critic_minibatches": 2, "critic_alone": True}, 2, [0, 1, 1, 2]),
    )
    for flags, total, counted in cases:
        assert updates_after_steps(steps_of(**flags)[1], total) == counted


@pytest.mark.parametrize(("zero_stage", "tokens"), [(0, None), (2, None), (3, None), (2, 18)])
def test_the_critics_updates_are_those_of_plain_torch(zero_stage, tokens, group):
    """At every way to shard the models, and with micro-batches of at most 18 tokens."""
    batch = holed_batch()
    weights, stats = critic_updates(batch, zero_stage, tokens)
    expected, losses = plain_critic(batch, rows_of_critic(1))
    assert largest_difference({name: weights[name] for name in expected}, expected) < WEIGHT_GAP
    assert stats["loss/value"] == near(sum(losses) / 8, UPDATE)


def test_the_actors_update_is_its_own(group):
    """Beside eight updates of the critic, weights and statistics are those beside one."""
    batch = holed_batch()
    weights, stats = critic_updates(batch)
    plain, plain_stats = critic_updates(batch, critic_minibatches=1, critic_epochs=1)
    actor = {name: x for name, x in weights.items() if name.startswith("actor")}
    assert largest_difference(actor, {name: plain[name] for name in actor}) < WEIGHT_GAP / 100  # in another order
    of_actor = {"loss/policy", "policy/entropy", "policy/approxkl", "val/ratio", "grad_norm/actor"}
    assert {name: stats[name] for name in of_actor} == near({name: plain_stats[name] for name in of_actor}, UPDATE)


def test_credit_is_computed_before_such_updates(tmp_path):
    for flags in ({"critic_minibatches": 2}, {"critic_epochs": 2}, {"rollout_is_mask": [0.2, 4.0]}):
        config = ppo_config(tmp_path, **flags)
        assert not config.credit_is_fused(config.plan_batches(1))
    config = ppo_config(tmp_path)
    assert config.credit_is_fused(config.plan_batches(1))


def test_sizes_that_do_not_divide_an_update_are_refused(tmp_path):
    config = ppo_config(tmp_path, critic_minibatches=3)
    with pytest.raises(UserError, match="--critic_minibatches 3 does not divide an update's 8 responses.*give 2"):
        config.plan_batches(1)
    config = config.changed(critic_minibatches=2, per_device_training_batch_size=8)
    plan = config.critic_plan(config.plan_batches(1))
    assert (plan.micro_batch, plan.accumulation, plan.update_per_rank, plan.global_batch) == (4, 1, 4, 4)


def test_the_critics_schedule_counts_its_own_updates(tmp_path):
    """Of 20 updates in two passes over each rollout, the critic makes three passes of four updates each: 20 x 6."""
    config = ppo_config(tmp_path, ppo_epochs=2, critic_epochs=3, critic_minibatches=4)
    assert config.critic_updates(config.plan_batches(1), 20) == 120


@pytest.mark.parametrize("place", ["scores", "gradients of the critic", "gradients of the actor"])
def test_what_is_not_finite_is_left_out(place, group, tmp_path):
    """Eight rows: two updates of the critic and one of the actor, of which those of the spoiled model are left out."""
    flags = {"ppo_epochs": 1, "critic_minibatches": 2, "on_nonfinite": "skip"}
    trainer = trainer_for(tmp_path, **flags)
    with spoiled(trainer, place, 0):
        metrics = trainer.iterate(batches(0))
    assert (
        metrics["skipped/nonfinite"] == {"scores": 3, "gradients of the critic": 2, "gradients of the actor": 1}[place]
    )
    assert trainer.update == 1
    assert ("loss/value" in metrics) is ("actor" in place) and ("loss/policy" in metrics) is ("critic" in place)
