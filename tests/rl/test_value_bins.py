# SPDX-License-Identifier: Apache-2.0
"""Values as distributions over bins, against Python's normal distribution and hand arithmetic."""

import math
from dataclasses import astuple
from statistics import NormalDist

import pytest
import torch

from closeness import FORMULA, assert_near, near
from macro_actions.value_bins import ValueBins, binned_value_loss
from rl_cases import mask_of

FOUR = ValueBins(0.0, 1.0, 4, 0.25)  # edges 0, 1/4, 1/2, 3/4, 1


@pytest.mark.parametrize(("given", "counted"), [(0.5, 0.5), (0.3, 0.3), (1.7, 1.0), (-0.2, 0.0)])
def test_targets_are_the_normal_distributions_masses(given, counted) -> None:
    below = [NormalDist(counted, 0.25).cdf(edge / 4) for edge in range(5)]
    masses = [(high - low) / (below[4] - below[0]) for low, high in zip(below[:4], below[1:], strict=True)]
    assert_near(FOUR.targets(torch.tensor([given]))[0], masses, FORMULA)


def test_the_expectation_is_of_the_centres() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 of the centres 1/8, 3/8, 5/8, 7/8: 1/16 + 3/32 + 5/64 + 7/64."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log() + 3.0
    assert_near(FOUR.expectation(logits), [11 / 32], FORMULA)


def test_the_published_bins_for_another_range() -> None:
    assert astuple(ValueBins.between(-0.1, 1.1)) == (-0.1, 1.1, 101, near(0.024))
    assert astuple(ValueBins.between(-2.0, 3.0)) == (-2.0, 3.0, 101, near(0.1))


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (0.0, math.inf)])
def test_bounds_without_a_range_between_them_are_refused(low, high) -> None:
    with pytest.raises(ValueError, match="bins need finite bounds, the lower one first"):
        ValueBins.between(low, high)


@pytest.mark.parametrize(("count", "sigma"), [(1, 0.1), (4, 0.0), (4, -0.1), (4, math.nan)])
def test_a_single_bin_or_no_spread_is_refused(count, sigma) -> None:
    with pytest.raises(ValueError, match=f"bins need count >= 2 and sigma > 0, not {count} and {sigma}"):
        ValueBins(0.0, 1.0, count, sigma)


def test_a_head_begins_with_the_values_of_another() -> None:
    """Centres 3/8 and 1/8 from the middle 1/2, of variance (9 + 1) / 2 / 64 = 5/64: slopes 24/5 and 8/5."""
    head = FOUR.head_from(torch.tensor([[0.5, -1.0]]))
    assert_near(head, [[-2.4, 4.8], [-0.8, 1.6], [0.8, -1.6], [2.4, -4.8]], FORMULA)
    for value in (0.0, 0.02, -0.02):  # of the old head; the next term is of third order
        logits = head @ torch.tensor([2 * value, 0.0])
        assert abs(float(FOUR.expectation(logits)) - (0.5 + value)) < 20 * abs(value) ** 3 + 1e-6
    assert_near(FOUR.expectation(head @ torch.tensor([1e6, 0.0])), 7 / 8, FORMULA)  # the last centre
    assert not FOUR.head_from(torch.zeros(1, 3)).any()
    assert FOUR.head_from(torch.ones(1, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_cross_entropy_by_hand() -> None:
    """Equal logits cost log 4 whatever the target; 3 tokens, of which one row weighs 2 and one return is outside."""
    mask = mask_of([2, 1], 2)
    returns = torch.tensor([[0.2, 1.5], [0.9, math.nan]])
    logits = torch.zeros(2, 2, 4).masked_fill(~mask[..., None], math.inf).requires_grad_()
    loss, stats = binned_value_loss(logits, returns, mask, FOUR, row_weights=torch.tensor([2.0, 1.0]))
    assert_near(loss, 5 * math.log(4) / 3, FORMULA)
    assert_near(stats["out_of_bounds"], 1 / 3, FORMULA)
    loss.backward()
    # The gradient of cross-entropy: (softmax - target) x weight / tokens.
    expected = 2 * (0.25 - FOUR.targets(returns[0, :1])) / 3
    assert_near(logits.grad[0, :1], expected, FORMULA)
    assert not logits.grad[1, 1].any()
