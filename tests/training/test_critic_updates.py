# SPDX-License-Identifier: Apache-2.0
"""A critic with more updates than the actor (--critic_minibatches, --critic_epochs), and one with bins.

Resume: test_resume.py. How a head with bins begins: models/test_value_head.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from closeness import UPDATE, assert_weights_near, near
from critic_updates import BINS, critic_updates, holed_batch, plain_critic, rows_of_critic
from dschat.base.errors import UserError
from dschat.models.layout import PassSize
from dschat.models.scalar import ScalarModel
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.credit import Credit
from dschat.training.ppo.models import response_values
from dschat.training.ppo.update import UpdateContext, ppo_update, updates_after_steps, updates_of_rollout
from factories import (
    engine_of,
    largest_difference,
    make_causal_lm,
    make_classifier,
    ppo_config,
    to_device,
    update_flags,
    whole_state,
)
from nonfinite_cases import batches, spoiled, trainer_for
from recorded_updates import scored_batch, updated
from resume_runs import lengths, ppo, result_of


def steps_of(epochs=1, critic_alone=False, **flags):
    """Which models each step trains, and how many rows it takes, of eight rows in updates of four."""
    config, plan = update_flags(4, 4, epochs, **flags)
    updates = updates_of_rollout(8, plan, config, 0, critic_alone)
    return [("A" * u.trains_actor + "C" * u.trains_critic, len(u.rows)) for u in updates], updates


BOTH, ACTOR, CRITIC, HALF = ("AC", 4), ("A", 4), ("C", 4), ("C", 2)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"epochs": 2}, [BOTH] * 4),
        ({"epochs": 2, "critic_alone": True}, [CRITIC] * 4),
        ({"epochs": 2, "critic_epochs": 1}, [ACTOR] * 2 + [BOTH] * 2),
        ({"critic_minibatches": 2, "critic_epochs": 2}, [HALF] * 4 + [HALF, HALF, ACTOR] * 2),
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


@pytest.mark.parametrize(("zero_stage", "tokens"), [(0, None), (2, 18)])
def test_the_critics_updates_are_those_of_plain_torch(zero_stage, tokens, group):
    """By rows, and with shards in micro-batches of at most 18 tokens."""
    batch = holed_batch()
    weights, stats = critic_updates(batch, zero_stage, tokens)
    expected, losses = plain_critic(batch, rows_of_critic(1))
    assert_weights_near({name: weights[name] for name in expected}, expected)
    assert stats["loss/value"] == near(sum(losses) / 8, UPDATE)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_critic_with_bins_is_trained_as_by_plain_torch(zero_stage, group):
    """Two passes of four mini-batches by cross-entropy; returns beyond the bounds count as the bounds."""
    batch = holed_batch()
    limits = BINS["value_range"]
    weights, stats = critic_updates(batch, zero_stage, **BINS)
    expected, losses = plain_critic(batch, rows_of_critic(1), limits)
    assert_weights_near({name: weights[name] for name in expected}, expected)
    assert stats["loss/value"] == near(sum(losses) / 8, UPDATE)
    returns = batch.returns[batch.response_mask]
    shares = [
        float(((x < limits[0]) | (x > limits[1])).double().mean())
        for x in (batch.returns[rows][batch.response_mask[rows]] for rows in rows_of_critic(1))
    ]
    assert stats["val/out_of_bounds"] == near(sum(shares) / 8, UPDATE) and "val/clipfrac" not in stats
    assert float(returns.abs().max()) > 1


def test_credit_within_the_update_is_that_before_it(group, tmp_path, monkeypatch):
    """Values come from the outputs that are trained on, where a rollout is one update."""
    flags = BINS | {"value_range": [-2.0, 12.0], "ppo_epochs": 1, "generation_batches": 1, "max_steps": 2}
    loop = ppo(tmp_path / "late", reward=lengths, **flags)
    assert loop.algorithm.config.credit_is_fused(loop.algorithm.plan)
    weights, _, _ = result_of(loop, tmp_path / "late")
    monkeypatch.setattr(PPOConfig, "credit_is_fused", lambda config, plan: False)
    expected, _, _ = result_of(ppo(tmp_path / "early", reward=lengths, **flags), tmp_path / "early")
    assert_weights_near(weights, expected, updates=8)  # two updates at twenty times the rate


def test_the_variance_explained_in_the_last_pass(group):
    """Of two passes of one update each: by the values of a critic after one update, whatever the micro-batch."""
    batch = to_device(scored_batch())
    after_one, plain = updated(batch)
    critic = make_classifier(seed=2)
    critic.load_state_dict(
        {name.removeprefix("critic.inner."): x for name, x in after_one.items() if "critic" in name}
    )
    mask = batch.response_mask.cpu()
    with torch.no_grad():
        values = response_values(ScalarModel(critic).to(mask.device), batch.rollout, PassSize(8))[mask].double()
    returns = batch.returns.cpu()[mask].double()
    expected = 1 - float((returns - values).var() / returns.var())
    for micro in (8, 2):
        _, stats = updated(batch, micro, critic_epochs=2)
        assert stats["val/explained_variance_after"] == near(expected, UPDATE)
    assert "val/explained_variance_after" not in plain and not any(name.startswith("fit/") for name in stats)


def test_an_update_without_a_counted_token_leaves_the_actor(group):
    """Adam's momentum would move it. Two updates of four rows, of which one has no token of the policy's loss."""
    batch = to_device(scored_batch())
    config, plan = update_flags(4, 4, 1)
    actor, critic = (engine_of(make(), 4) for make in (make_causal_lm, make_classifier))
    ppo_update(UpdateContext(actor, critic, Credit(batch), config, plan), 0)
    before, of_critic = whole_state(actor), whole_state(critic)

    nothing = replace(batch, counted=torch.zeros_like(batch.response_mask))
    stats = ppo_update(UpdateContext(actor, critic, Credit(nothing), config, plan), 0)
    assert largest_difference(whole_state(actor), before) == 0
    assert largest_difference(whole_state(critic), of_critic) > 0
    assert stats["loss/value"] > 0 and not {"loss/policy", "val/ratio", "grad_norm/actor"} & stats.keys()

    rows = torch.as_tensor(updates_of_rollout(8, plan, config, 0)[1].rows)
    counted = batch.response_mask.clone()
    counted[rows] = False
    stats = ppo_update(UpdateContext(actor, critic, Credit(replace(batch, counted=counted)), config, plan), 0)
    assert largest_difference(whole_state(actor), before) > 0 and stats["val/ratio"] > 0.5


def test_the_actors_update_is_its_own(group):
    """Beside eight updates of the critic, statistics and the gradient's norm are those beside one."""
    batch = holed_batch()
    _, stats = critic_updates(batch)
    _, plain_stats = critic_updates(batch, critic_minibatches=1, critic_epochs=1)
    of_actor = {"loss/policy", "policy/entropy", "policy/approxkl", "val/ratio", "grad_norm/actor"}
    assert {name: stats[name] for name in of_actor} == near({name: plain_stats[name] for name in of_actor}, UPDATE)


OTHERS = ({"whiten_advantages": True}, {"termination_condition": "mine.py:ends"})


def test_credit_is_computed_before_such_updates(tmp_path):
    for flags in ({"critic_minibatches": 2}, {"critic_epochs": 2}, {"rollout_is_mask": [0.2, 4.0]}, *OTHERS):
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


@pytest.mark.parametrize(
    ("place", "left_out"), [("scores", 3), ("gradients of the critic", 2), ("gradients of the actor", 1)]
)
def test_what_is_not_finite_is_left_out(place, left_out, group, tmp_path):
    """Eight rows: two updates of the critic and one of the actor, of which those of the spoiled model are left out."""
    flags = {"ppo_epochs": 1, "critic_minibatches": 2, "on_nonfinite": "skip"}
    trainer = trainer_for(tmp_path, **flags)
    with spoiled(trainer, place, 0):
        metrics = trainer.iterate(batches(0))
    assert metrics["skipped/nonfinite"] == left_out and trainer.update == 1
    assert ("loss/value" in metrics) is ("actor" in place) and ("loss/policy" in metrics) is ("critic" in place)
