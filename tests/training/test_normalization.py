# SPDX-License-Identifier: Apache-2.0
"""Scores and advantages with mean 0 and variance 1, and the coefficient of the critic's loss."""

import math

import pytest
import torch

from closeness import UPDATE, near
from dschat.training.ppo import credit
from dschat.training.ppo.credit import assign_credit, trained_scores, with_scores
from factories import EOS, make_rollout, ppo_config, to_device
from macro_actions.rewards import ScoreMoments
from macro_actions.segments import segment
from macro_actions.types import ScoredRollout, Trajectory
from nonfinite_cases import batches, trainer_for


def scored(scores, lengths):
    rollout = make_rollout([([5], [6] * length) for length in lengths])
    return ScoredRollout(rollout, torch.zeros(rollout.response_mask.shape), torch.tensor(scores))


def test_moments_of_a_rollout():
    """1 and 3; the row without a token has no score, and NaN is left to those who look for it."""
    found = with_scores(ScoreMoments(), scored([1.0, 100.0, math.nan, 3.0], [2, 0, 1, 1]))
    assert found == ScoreMoments(2.0, 2.0, 2.0)
    assert with_scores(found, scored([50.0], [0])) == found


def test_moments_are_those_of_all_ranks(monkeypatch):
    """4, 5 and another rank's 7, of which the mean is 16/3, after 1 and 3: all have the mean 4 and the squares 20."""
    others = iter([torch.tensor([1.0, 7.0]), (7 - 16 / 3) ** 2])
    monkeypatch.setattr(credit, "sum_over_ranks", lambda own: own + next(others))
    found = with_scores(ScoreMoments(2.0, 2.0, 2.0), scored([4.0, 5.0], [1, 2]))
    assert (found.count, found.mean, found.squares) == (5, pytest.approx(4.0), pytest.approx(20.0))


def rewards(tmp_path, moments, **flags):
    """On the last tokens of two responses with scores 3 and 7, of which the second was cut."""
    rollout = make_rollout([([5], [6, EOS]), ([5], [6, 7])])
    zeros = torch.zeros(2, 2)
    trajectory = to_device(Trajectory(rollout, zeros, zeros, zeros, torch.tensor([3.0, 7.0])))
    config = ppo_config(tmp_path, **flags)
    macro = segment(trajectory.response_mask, trajectory.response_mask)
    batch = assign_credit(trajectory, macro, 0.0, config, 1, moments)
    assert batch.trajectory.scores.tolist() == [3.0, 7.0]
    return batch.rewards[:, 1].tolist()


def test_scores_are_normalised_before_the_penalty_and_clipping(tmp_path):
    moments = ScoreMoments(10, 4.0, 40.0)  # standard deviation 2
    assert rewards(tmp_path, None) == [3.0, 7.0]
    assert rewards(tmp_path, moments) == pytest.approx([-0.5, 1.5])
    assert rewards(tmp_path, moments, missing_eos_penalty=0.7) == pytest.approx([-0.5, 0.8])
    assert rewards(tmp_path, moments, missing_eos_penalty=0.7, clip_reward_value=0.6) == pytest.approx([-0.5, 0.6])


def test_one_token_responses_have_no_advantage_in_their_rows(group, tmp_path):
    trainer = trainer_for(tmp_path, normalize_advantages="row", max_answer_seq_len=1)
    metrics = trainer.iterate(batches(0))
    assert all(map(math.isfinite, metrics.values())) and metrics["loss/policy"] == 0


def test_the_value_coefficient_scales_the_gradient_and_not_the_metric(group, tmp_path):
    """Clipping is off: Adam's updates stay nearly the same, as the flag's description says."""
    plain, scaled = (
        trainer_for(tmp_path / str(coef), ppo_epochs=1, vf_coef=coef).iterate(batches(0)) for coef in (1.0, 0.25)
    )
    assert scaled["grad_norm/critic"] == near(0.25 * plain["grad_norm/critic"], UPDATE)
    assert scaled["loss/value"] == near(plain["loss/value"])
    assert scaled["grad_norm/actor"] == near(plain["grad_norm/actor"], UPDATE, scale=0)


def test_the_longest_response_is_read_when_scores_are_penalised(tmp_path):
    """DAPO's soft punishment by hand: in the last 16 of 64 tokens a score falls by 1/16 per token."""
    config = ppo_config(tmp_path, length_buffer=16, max_answer_seq_len=32)
    config = config.changed(max_answer_seq_len=64)
    lengths = torch.tensor([48, 56, 64])
    scores = trained_scores(torch.zeros(3), torch.ones(3, dtype=torch.bool), lengths, config, None)
    assert scores.tolist() == [0.0, -0.5, -1.0]
