# SPDX-License-Identifier: Apache-2.0
"""Rewards of replies, by hand."""

import torch

from closeness import FORMULA, assert_near
from dschat.rl.masked import masked_moments
from dschat.rl.refuel import PairBatch, reply_rewards, whiten_rewards
from factories import make_rollout


def test_reply_rewards_by_hand():
    """2 − 0.1 · 3 where the reply ended; −10 − 0.1 · 4 where it was cut, whatever the score."""
    scores, kl = torch.tensor([2.0, 5.0]), torch.tensor([3.0, 4.0])
    rewards = reply_rewards(scores, torch.tensor([True, False]), kl, 0.1, -10.0)
    torch.testing.assert_close(rewards, torch.tensor([1.7, -10.4]))


def test_the_kl_and_the_difference_of_a_pair():
    rows = [([3, 4], [5]), ([3], [6]), ([3, 4], [7]), ([3], [8])]
    numbers = torch.tensor([1.0, 2.0, 3.0, 5.0])
    batch = PairBatch(make_rollout(rows), numbers, numbers - 0.5, numbers, 2 * numbers)
    torch.testing.assert_close(batch.kl, torch.full((4,), 0.5))
    torch.testing.assert_close(batch.reward_differences, torch.tensor([2.0 - 6.0, 4.0 - 10.0]))


def test_whitened_rewards_by_hand():
    """Of 1, 3, 5, 7: mean 4, variance 5."""
    rewards = torch.tensor([1.0, 3.0, 5.0, 7.0])
    totals = masked_moments(rewards, torch.ones(4, dtype=torch.bool))
    expected = torch.tensor([-3.0, -1.0, 1.0, 3.0]) / 5**0.5
    assert_near(whiten_rewards(rewards, totals), expected, FORMULA)
