# SPDX-License-Identifier: Apache-2.0
"""Token rewards, KL estimators and KL controllers against scalars and hand arithmetic."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from closeness import FORMULA, assert_near
from dschat.rl.rewards import (
    AdaptiveKL,
    FixedKL,
    ScoreMoments,
    kl_controller,
    kl_estimate,
    penalise_missing_eos,
    token_rewards,
)
from rl_cases import mask_of, normal

ESTIMATORS = ("k1", "k2", "k3")


# d = 0.5: k1 0.5, k2 0.125, k3 exp(-0.5) - 0.5 = 0.106531; d = -1: k1 -1, k2 0.5, k3 e - 2 = 0.718282.
@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])]
)
def test_kl_estimators_by_hand(estimator, expected) -> None:
    found = kl_estimate(torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1.5, -2.0]]), estimator)
    assert_near(found, [expected], FORMULA)


def test_an_unknown_estimator_raises() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")


def test_token_rewards_by_hand() -> None:
    """The score joins the KL penalty on the last response token; kl is the divergence, not the penalty."""
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    ref_logprobs = torch.tensor([[-1.5, -1.0, -3.0], [-3.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    rewards, kl = token_rewards(logprobs, ref_logprobs, torch.tensor([4.0, -4.0, 7.0]), mask_of([3, 1, 0], 3), 0.1)
    assert_near(kl, [[0.5, -1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], FORMULA)
    assert_near(rewards, [[-0.05, 0.1, 4.0], [-4.2, 0.0, 0.0], [0.0, 0.0, 0.0]], FORMULA)


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


def test_fixed_kl_stays() -> None:
    controller = FixedKL(0.05)
    assert controller.update(kl=100.0, num_samples=256).value == 0.05
    with pytest.raises(FrozenInstanceError):
        controller.value = 1.0


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


def test_the_controller_that_flags_ask_for() -> None:
    assert kl_controller(0.1, None, 500) == FixedKL(0.1)
    assert kl_controller(0.1, 6.0, 500) == AdaptiveKL(value=0.1, target=6.0, horizon=500)


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
    moments = ScoreMoments()
    for _ in range(100):
        moments = moments.merged(2, 1e8 + 0.5, 0.5)  # 1e8 and 1e8 + 1
    assert moments.deviation == pytest.approx(0.5, rel=1e-6)


def test_adaptive_kl_finds_the_coefficient_that_holds_the_target() -> None:
    """A policy whose KL is 0.6/coefficient meets the target of 6 at a coefficient of 0.1."""
    controller = AdaptiveKL(0.02, 6.0, 1000)
    for _ in range(400):
        controller = controller.update(0.6 / controller.value, 64)
    assert controller.value == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_agree_in_the_mean(estimator) -> None:
    """Sampled from the policy, k1 and k3 average to the exact KL of two categoricals; k2 is close for near ones."""
    policy = torch.log_softmax(normal((16,), 0), 0)
    reference = torch.log_softmax(normal((16,), 0) + 0.2 * normal((16,), 1), 0)
    exact = (policy.exp() * (policy - reference)).sum().item()
    mean = (policy.exp() * kl_estimate(policy, reference, estimator)).sum().item()
    assert mean == pytest.approx(exact, rel=0.15 if estimator == "k2" else 1e-4)
