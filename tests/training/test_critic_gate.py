# SPDX-License-Identifier: Apache-2.0
"""EVPO's gate (2604.19485): the critic is a baseline only while it explains some of the variance of the returns."""

import pytest
import torch

from cli_runs import read_jsonl
from closeness import FORMULA, assert_near, near
from dschat.training.ppo import metrics
from dschat.training.ppo.credit import assign_credit
from dschat.training.ppo.metrics import critic_gate
from factories import make_rollout, ppo_config, to_device
from macro_actions.conditions import fixed
from macro_actions.segments import segment
from macro_actions.types import Trajectory
from resume_runs import lengths, ppo

# Two responses, of two tokens with score 1 and of one token with score 0: the rewards to come are 1 1 and 0, of mean
# 2/3 and variance 2/9.
GOOD = [[0.8, 0.6], [0.1, 0.0]]  # errors .2, .4 and −.1: mean square .07, mean 1/6
BAD = [[0.0, 0.0], [1.0, 0.0]]  # errors 1, 1 and −1: variance 8/9
ERRORS = 0.07 - 1 / 36


def credit(tmp_path, values, scores=(1.0, 0.0), **flags):
    rollout = make_rollout([([5], [6, 7]), ([5], [8])])
    zeros = torch.zeros(2, 2)
    trajectory = to_device(Trajectory(rollout, zeros, zeros, torch.tensor(values), torch.tensor(scores)))
    config = ppo_config(tmp_path, **{"advantage_estimator": "evpo", "ngram": 1, "lam": 0.5} | flags)
    mask = trajectory.response_mask
    return assign_credit(trajectory, segment(fixed(mask, 1), mask), 0.0, config), config


def test_a_critic_that_explains_is_the_baseline(tmp_path):
    """δ = −.2 and .4: Â = −.2 + .5 · .4 = 0, .4; and −.1."""
    batch, config = credit(tmp_path, GOOD)
    assert_near(batch.advantages.cpu(), [[0.0, 0.4], [-0.1, 0.0]], FORMULA)
    gate = critic_gate(batch, config.estimator)
    assert gate.metrics() == near({"val/gate_explained_variance": 1 - ERRORS * 9 / 2, "val/gate_open": 1.0}, FORMULA)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_a_critic_that_explains_nothing_is_none(lam, tmp_path):
    """1 − (8/9) / (2/9) = −3, whatever λ: the returns of GAE contain the values and would be explained at λ = 0."""
    batch, config = credit(tmp_path, BAD, lam=lam)
    assert_near(batch.advantages.cpu(), [[1 / 3, 1 / 3], [-2 / 3, 0.0]], FORMULA)
    gate = critic_gate(batch, config.estimator)
    assert gate.metrics() == near({"val/gate_explained_variance": -3.0, "val/gate_open": 0.0}, FORMULA)
    assert gate.mean_return == near(2 / 3, FORMULA)
    assert torch.equal(batch.returns, credit(tmp_path, BAD, lam=lam, advantage_estimator="gae")[0].returns)


def test_returns_that_are_all_the_same_shut_the_gate(tmp_path):
    """Explained variance 0 is not above 0: equal scores say nothing about any token."""
    batch, _ = credit(tmp_path, GOOD, scores=(1.0, 1.0))
    assert batch.advantages.abs().max() == 0


def test_all_ranks_decide_together(tmp_path, monkeypatch):
    """Another rank has nine times as many rows, the good critic, and scores and values that are higher by 1.

    Its rewards to come are 2 2 and 1. Of 30 numbers, 3 are 1 1 0 and 27 these: mean 47/30, mean square 83/30.
    """
    batch, config = credit(tmp_path, BAD)
    good, _ = credit(tmp_path, [[1.8, 1.6], [1.1, 0.0]], scores=(2.0, 1.0))
    sums = []
    monkeypatch.setattr(metrics, "sum_over_ranks", lambda numbers: sums.append(numbers) or numbers)
    critic_gate(good, config.estimator)
    monkeypatch.setattr(metrics, "sum_over_ranks", lambda numbers: numbers + 9 * sums.pop(0))
    gate = critic_gate(batch, config.estimator)
    # Of ten parts one has errors 1, 1, −1 (mean 1/3, mean square 1) and nine have the small ones.
    square, mean = (1 + 9 * 0.07) / 10, (1 / 3 + 9 / 6) / 10
    variance = 83 / 30 - (47 / 30) ** 2
    assert gate.explained_variance == near(1 - (square - mean**2) / variance, FORMULA)
    assert gate.mean_return == near(47 / 30, FORMULA) and not sums


def test_a_run_logs_the_gate(group, tmp_path):
    """A critic of random weights explains nothing at first; credit needs the whole rollout, so it is not fused."""
    loop = ppo(tmp_path, reward=lengths, advantage_estimator="evpo", ppo_epochs=1, generation_batches=1, max_steps=2)
    assert not loop.algorithm.config.credit_is_fused(loop.algorithm.plan)
    loop.fit()
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "loss/policy" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["val/gate_open"] == float(row["val/gate_explained_variance"] > 0)
