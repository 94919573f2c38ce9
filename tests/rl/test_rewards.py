# SPDX-License-Identifier: Apache-2.0
"""Token rewards, rewards of replies, KL estimators and KL controllers against scalars and hand arithmetic."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from closeness import FORMULA, assert_near
from factories import make_rollout
from macro_actions.refuel import PairBatch, reply_rewards
from macro_actions.rewards import AdaptiveKL, ScoreMoments, kl_estimate, penalise_missing_eos, token_rewards
from rl_cases import mask_of


# d = 0.5: k1 0.5, k2 0.125, k3 exp(-0.5) - 0.5 = 0.106531; d = -1: k1 -1, k2 0.5, k3 e - 2 = 0.718282.
@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])]
)
def test_kl_estimators_by_hand(estimator, expected) -> None:
    found = kl_estimate(torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1.5, -2.0]]), estimator)
    assert_near(found, [expected], FORMULA)


def test_token_rewards_by_hand() -> None:
    """The score joins the KL penalty on the last response token; kl is the divergence, not the penalty."""
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    ref_logprobs = torch.tensor([[-1.5, -1.0, -3.0], [-3.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    rewards, kl = token_rewards(logprobs, ref_logprobs, torch.tensor([4.0, -4.0, 7.0]), mask_of([3, 1, 0], 3), 0.1)
    assert_near(kl, [[0.5, -1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], FORMULA)
    assert_near(rewards, [[-0.05, 0.1, 4.0], [-4.2, 0.0, 0.0], [0.0, 0.0, 0.0]], FORMULA)


def test_rewards_of_macro_actions_stand_where_they_are_and_leave_the_rest_to_the_end() -> None:
    """5 is 1 + 3 and a rest of 1; clamped to 2, the rest is −2; a row that is left out has nothing."""
    zero, own = torch.zeros(3, 3), torch.tensor([[1.0, 0.0, 3.0], [1.0, 3.0, 9.0], [9.0, 9.0, 9.0]])
    scores, mask = torch.tensor([5.0, 5.0, 7.0]), mask_of([3, 2, 0], 3)
    rewards, _ = token_rewards(zero, zero, scores, mask, 0.1, segment_rewards=own)
    assert rewards.tolist() == [[1.0, 0.0, 4.0], [1.0, 4.0, 0.0], [0.0, 0.0, 0.0]]
    rewards, _ = token_rewards(zero, zero, scores, mask, 0.1, "k1", 2.0, own)
    assert rewards.tolist() == [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_clipping_clamps_the_score_and_not_the_penalty() -> None:
    zero = torch.zeros(3, 1)
    mask = torch.ones(3, 1, dtype=torch.bool)
    rewards, kl = token_rewards(zero + 30.0, zero, torch.tensor([9.0, -9.0, 1.0]), mask, 0.1, "k1", 2.5)
    assert_near(rewards, [[2.5 - 3.0], [-2.5 - 3.0], [1.0 - 3.0]], FORMULA)
    assert_near(kl, [[30.0], [30.0], [30.0]], FORMULA)


def test_a_missing_eos_costs_the_penalty() -> None:
    scores = torch.tensor([1.0, 2.0, -3.0])
    found = penalise_missing_eos(scores, torch.tensor([True, False, False]), 1.5)
    assert_near(found, [1.0, 0.5, -4.5], FORMULA)
    assert scores.tolist() == [1.0, 2.0, -3.0]
    assert torch.equal(penalise_missing_eos(scores, torch.tensor([False] * 3), None), scores)


# value *= 1 + clip(kl/target - 1, ±0.2)·n/horizon, from 0.1 with target 6, horizon 10000, n = 256.
@pytest.mark.parametrize(
    ("kl", "expected"), [(12.0, 0.100512), (6.6, 0.100256), (6.0, 0.1), (5.4, 0.099744), (0.0, 0.099488)]
)
def test_adaptive_kl_by_hand(kl, expected) -> None:
    controller = AdaptiveKL(0.1, 6.0, 10000)
    new = controller.update(kl, 256)
    assert new.value == pytest.approx(expected, abs=1e-9)
    assert (new.target, new.horizon, controller.value) == (6.0, 10000, 0.1)
    assert new.update(6.0, 256).value == pytest.approx(expected, abs=1e-9)
    with pytest.raises(FrozenInstanceError):
        controller.value = 1.0


def test_adaptive_kl_stays_positive_with_a_short_horizon() -> None:
    """512 responses at a horizon of 100 count as one horizon: the coefficient falls by the fifth of the clip."""
    assert AdaptiveKL(0.1, 6.0, 100).update(0.0, 512).value == pytest.approx(0.08)


def test_moments_of_two_batches_by_hand() -> None:
    """1, 3 (mean 2, squares 2) and 4, 5, 7 (mean 16/3, squares 14/3): together mean 4, squares 9+1+0+1+9."""
    first = ScoreMoments().merged(2, 2.0, 2.0)
    assert first == ScoreMoments(2, 2.0, 2.0)
    both = first.merged(3, 16 / 3, 14 / 3)
    assert (both.count, both.mean, both.squares) == (5, pytest.approx(4.0), pytest.approx(20.0))
    assert both.deviation == pytest.approx(2.0)
    assert_near(both.normalised(torch.tensor([4.0, 6.0, 3.0])), [0.0, 1.0, -0.5], FORMULA)
    assert both.merged(0, 0.0, 0.0) == both
    assert both.merged(1, 10.0, 0.0).mean == pytest.approx(5.0)


def test_without_scores_nothing_is_normalised_and_equal_ones_are_0() -> None:
    scores = torch.tensor([2.0, -1.0])
    assert torch.equal(ScoreMoments().merged(0, 0.0, 0.0).normalised(scores), scores)
    assert ScoreMoments(8, 2.0, 0.0).normalised(torch.tensor([2.0, 2.0])).tolist() == [0.0, 0.0]


def test_moments_far_from_0_keep_their_digits() -> None:
    """Batches of two scores with means 1e8 and 1e8 + 2 in turn; each score is 1 from its mean and 0 or 2 from 1e8 + 1.

    The variance of all is therefore (4 + 0) / 2.
    """
    moments = ScoreMoments()
    for _ in range(100):
        for mean in (1e8, 1e8 + 2):
            moments = moments.merged(2, mean, 2.0)
    assert moments.mean - 1e8 == pytest.approx(1.0, abs=1e-5)
    assert moments.deviation == pytest.approx(2**0.5, rel=1e-6)


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
