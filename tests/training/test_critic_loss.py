# SPDX-License-Identifier: Apache-2.0
"""What the losses take of a rollout: cut answers for the critic alone, weights of groups, masked ratios."""

import math
from dataclasses import replace

import pytest
import torch

from closeness import EPS, FORMULA, FORWARD, UPDATE, assert_near, assert_weights_near, near
from dschat.training.ppo.credit import assign_credit
from factories import EOS, largest_difference, make_rollout, ppo_config, to_device
from macro_actions.losses import value_loss
from macro_actions.segments import segment
from macro_actions.types import Trajectory
from recorded_updates import scored_batch, updated

ROWS = [([5], [6, EOS]), ([5], [6, 7]), ([6], [7, EOS]), ([6], [8, EOS])]  # the second response was cut
SCORES = [0.0, 1.0, 0.5, 0.5]


def batch_of(folder, samples=2, **flags):
    """Values 0, no KL, γ = λ = 1: every token's advantage is the response's score."""
    rollout = make_rollout(ROWS)
    zeros = torch.zeros(4, 2)
    trajectory = to_device(Trajectory(rollout, zeros, zeros, zeros, torch.tensor(SCORES)))
    macro = segment(trajectory.response_mask, trajectory.response_mask)
    config = ppo_config(folder, gamma=1.0, lam=1.0, samples_per_prompt=samples, **flags)
    return assign_credit(trajectory, macro, 0.0, config, samples)


def test_a_cut_answer_trains_the_critic_alone(group, tmp_path):
    """The mean 1/2 and the variance 1/8 of all four scores whiten them: the cut answer counts among them."""
    batch = batch_of(tmp_path, cut_answers="critic_only", whiten_advantages=True)
    assert batch.policy_mask.cpu().tolist() == [[True, True], [False, False], [True, True], [True, True]]
    whitened = [(score - 0.5) / math.sqrt(1 / 8) for score in SCORES]
    assert_near(batch.advantages.cpu(), [[x, x] for x in whitened], FORMULA)
    assert_near(batch.returns.cpu(), [[score, score] for score in SCORES], FORMULA)
    assert batch.response_mask.all()
    assert batch_of(tmp_path).counted is None


def test_groups_weigh_in_the_critics_loss(group, tmp_path):
    """EasyPPO's example: variances 1/4 and 0, weights 4 and 100 over their mean 52."""
    batch = batch_of(tmp_path, critic_group_weight=1.0, critic_group_weight_min=0.01)
    assert_near(batch.critic_weights.cpu(), [4 / 52, 4 / 52, 100 / 52, 100 / 52], FORMULA)
    assert batch_of(tmp_path).critic_weights is None
    assert batch_of(tmp_path, samples=1, critic_group_weight=1.0).critic_weights is None  # an evaluation


def test_the_weights_reach_the_loss_whatever_the_micro_batch(group):
    """The critic's loss is that of the formula with the weights of the rows, over the count without them."""
    batch = to_device(scored_batch())
    weights = torch.arange(8, device=batch.returns.device) / 4
    weighed = replace(batch, critic_weights=weights)
    _, stats = updated(weighed)
    _, split = updated(weighed, 2)
    values = batch.trajectory.values
    expected, _ = value_loss(values, values, batch.returns, batch.response_mask, 0.2, row_weights=weights)
    assert abs(stats["loss/value"] - split["loss/value"]) < FORWARD * EPS * stats["loss/value"]
    assert abs(stats["loss/value"] - float(expected)) < FORWARD * EPS * float(expected)


@pytest.mark.parametrize("policy_ratio", ["token", "macro"])
def test_masked_ratios_are_to_the_sampling_policy(policy_ratio, group):
    """The sampler gave every token half of the actor's probability: ratios of 2, of which none is clipped."""
    batch = to_device(scored_batch(drift=0.0))
    rollout = replace(batch.rollout, drawn_logprobs=batch.trajectory.logprobs - math.log(2))
    drawn = replace(batch, trajectory=replace(batch.trajectory, rollout=rollout))
    flags = {"policy_ratio": policy_ratio, "loss_mean": "token"}
    wide, stats = updated(drawn, rollout_is_mask=[0.5, 100.0], **flags)
    assert stats["policy/clipfrac"] == 0
    if policy_ratio != "macro":
        assert stats["val/ratio"] == pytest.approx(2.0, rel=1e-4)
        # The ratio multiplies the advantage, as a weight does, and is no matter of the old policy.
        doubled = replace(batch, advantages=2 * batch.advantages)
        expected, expected_stats = updated(doubled, cliprange=10.0, **flags)
        assert_weights_near(wide, expected)
        assert stats["grad_norm/actor"] == near(expected_stats["grad_norm/actor"], UPDATE)
    narrow, stats = updated(drawn, rollout_is_mask=[0.5, 1.5], **flags)
    unmoved, _ = updated(batch, learning_rate=0.0)
    of_actor = {name: x for name, x in unmoved.items() if name.startswith("actor")}
    assert stats["policy/clipfrac"] == 1 and stats["loss/policy"] == 0
    assert largest_difference({name: narrow[name] for name in of_actor}, of_actor) == 0


def test_without_log_probs_of_a_sampler_the_ratio_is_to_the_policy_at_rollout(group):
    batch = to_device(scored_batch())
    rollout = replace(batch.rollout, drawn_logprobs=batch.trajectory.logprobs)
    given = replace(batch, trajectory=replace(batch.trajectory, rollout=rollout))
    limits = {"rollout_is_mask": [0.8, 1.2]}
    (found, stats), (expected, _) = updated(batch, **limits), updated(given, **limits)
    assert largest_difference(found, expected) == 0 and 0 < stats["policy/clipfrac"] < 1


def test_rollouts_ahead_are_masked_if_asked(tmp_path):
    ahead = {"rollout_engine": "vllm", "vllm_url": ["http://a"], "rollouts_ahead": 1}
    assert ppo_config(tmp_path, **ahead).vllm.rollout_is_clip == 2
    assert ppo_config(tmp_path, rollout_is_mask=[0.2, 4.0], **ahead).vllm.rollout_is_clip is None
