# SPDX-License-Identifier: Apache-2.0
"""Segmental advantage estimation (2601.07320), and EVPO's baseline where the critic explains nothing (2604.19485)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rl_references as ref
from closeness import FORMULA, FORWARD, assert_near
from macro_actions.conditions import fixed
from macro_actions.estimators import critic_targets, with_mean_baseline
from macro_actions.settings import EstimatorSettings
from rl_cases import PADDING, PROPERTY, SEEDS, SEGMENTS, credit_of, masked_case, trajectory_of

# A response of three tokens in two macro actions, of two tokens and one: values .5 .1 .2, and log-ratios −.2, 0 and 0
# to the reference, which at a KL coefficient of 1 are rewards .2 0 0; the score is 1.
ENDS = torch.tensor([[False, True, True]])


def three_tokens():
    trajectory = trajectory_of([3], 3, 0)
    logprobs = torch.tensor([[-1.2, -1.0, -1.0]])
    values = torch.tensor([[0.5, 0.1, 0.2]])
    return replace(
        trajectory, logprobs=logprobs, ref_logprobs=-torch.ones(1, 3), values=values, scores=torch.tensor([1.0])
    )


# δ = .2 + .1 − .5 = −.2, 0 + .2 − .1 = .1 and 1 − .2 = .8. λ = .5 acts between the second and the third token alone:
# Â = .8, .1 + .5 · .8 = .5, −.2 + .5 = .3. With γ = .5 the second δ is .1 − .1 = 0: Â = .8, 0 + .25 · .8 = .2, 0.
@pytest.mark.parametrize(("gamma", "advantages"), [(1.0, [0.3, 0.5, 0.8]), (0.5, [0.0, 0.2, 0.8])])
def test_sae_by_hand(gamma, advantages) -> None:
    batch = credit_of(three_tokens(), ENDS, "sae", kl_coef=1.0, lam=0.5, gamma=gamma)
    assert_near(batch.advantages, [advantages], FORMULA)
    returns = [a + v for a, v in zip(advantages, [0.5, 0.1, 0.2], strict=True)]
    assert_near(batch.returns, [returns], FORMULA)


def test_the_critic_of_sae_has_a_lambda_of_its_own() -> None:
    """λ = 1: the rewards to come, 1.2, 1 and 1. One over two macro actions: α = 1 gives λ = .5 for the policy."""
    batch = credit_of(three_tokens(), ENDS, "sae", kl_coef=1.0, lam=0.1, lam_alpha=1.0, lam_critic=1.0)
    assert_near(batch.advantages, [[0.3, 0.5, 0.8]], FORMULA)
    assert_near(batch.returns, [[1.2, 1.0, 1.0]], FORMULA)


@PROPERTY
@given(
    segments=SEGMENTS,
    padding=PADDING,
    seed=SEEDS,
    gamma=st.sampled_from([0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_sae_is_the_recursion_over_tokens(segments, padding, seed, gamma, lam) -> None:
    """Numbers off the response do not count. Sums of up to 30 rewards and values, each with a rounding."""
    ends, mask = masked_case(segments, padding)
    trajectory = trajectory_of([sum(row) for row in segments], mask.shape[1], seed, off_mask=float("nan"))
    batch = credit_of(trajectory, ends, "sae", kl_coef=0.1, gamma=gamma, lam=lam)
    assert bool((batch.advantages[~mask] == 0).all()) and bool((batch.returns[~mask] == 0).all())
    for row, lengths in enumerate(segments):
        tokens = sum(lengths)
        values = trajectory.values[row, :tokens].tolist()
        rewards = batch.rewards[row, :tokens].tolist()
        advantages = ref.sae(values, rewards, lengths, gamma, lam)
        assert_near(batch.advantages[row, :tokens], advantages, FORWARD)
        assert_near(batch.returns[row, :tokens], [a + v for a, v in zip(advantages, values, strict=True)], FORWARD)


def test_the_mean_baseline_by_hand() -> None:
    """Macro rewards .2 and 1: with γ = .5 the sums are .7 and 1, and a mean return of .4 leaves .3 .3 .6."""
    settings = EstimatorSettings(kl_coef=1.0, gamma=0.5, lam=0.5, value_function="first")
    batch = credit_of(three_tokens(), ENDS, "evpo", kl_coef=1.0, gamma=0.5, lam=0.5, value_function="first")
    values, sums = critic_targets(batch, settings)
    assert_near(values, [[0.5, 0.2]], FORMULA)
    assert_near(sums, [[0.7, 1.0]], FORMULA)
    baseline = with_mean_baseline(batch, 0.4, settings)
    assert_near(baseline.advantages, [[0.3, 0.3, 0.6]], FORMULA)
    assert torch.equal(baseline.returns, batch.returns)


def test_rows_without_a_token_have_no_baseline() -> None:
    trajectory = trajectory_of([2, 0], 3, 0)
    batch = credit_of(trajectory, fixed(trajectory.response_mask, 1), "evpo")
    found = with_mean_baseline(batch, 5.0, EstimatorSettings()).advantages
    assert found[1].tolist() == [0.0] * 3 and found[0, 2] == 0
