# SPDX-License-Identifier: Apache-2.0
"""Equal up to float32, on every processor: tolerances follow from the scale of numbers and from how they came about.

Kernels add in different orders. Each rounding is wrong by at most half an eps of the largest number that is added, and
a number that is small because larger ones cancel keeps their errors. So a tolerance is: roundings x eps x scale.
"""

from typing import Any

import pytest
import torch

EPS = torch.finfo(torch.float32).eps
# Roundings that a number went through.
FORMULA = 16  # in a formula of `rl`: some ten sums, products and exponentials of a token
FORWARD = 128  # in a toy's forward pass: two layers of about ten steps each, whose sums have 32 to 64 terms
UPDATE = 1024  # in a backward pass and what follows it: norms over all weights, sums over a batch, later updates
# Adam divides a gradient by its size, so that one that is hardly more than its rounding moves a weight by some part of
# the learning rate: nearly all of them by less than a quarter of a step at 5e-5, the smallest rate that tests compare
# weights at. Few, whose gradient is nothing but rounding, go another way by a step or two.
WEIGHT_GAP = 5e-5 / 4
FEW = 4  # of some ten thousand weights; a row of the smallest matrix has eight
FEW_GAP = 2 * 5e-5


def near(expected: Any, roundings: float = FORWARD, scale: float = 1.0) -> Any:
    """What a number, or those of a list or dict, must equal.

    Args:
        expected: from hand arithmetic or an independent implementation.
        roundings: FORMULA, FORWARD or UPDATE.
        scale: size of the numbers that were added up, where it is more than what came out; 0: relative alone.
    """
    return pytest.approx(expected, rel=roundings * EPS, abs=roundings * EPS * scale)


def assert_near(
    found: torch.Tensor, expected: Any, roundings: float = FORWARD, scale: float = 1.0, message: str | None = None
) -> None:
    """The same for tensors or nested lists of one shape; NaN equals nothing."""
    found, expected = found.detach().double(), torch.as_tensor(expected, dtype=torch.float64).detach()
    far = (found - expected).abs() - roundings * EPS * expected.abs().clamp(min=scale)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert (far <= 0).all(), f"{message or 'tensors'}: {found} is not {expected}, by {far.max()} too much"


def assert_weights_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], updates: float = 1.0, message: str = "weights"
) -> None:
    """Weights by name after so many updates by Adam: nearly all within `WEIGHT_GAP`, and `FEW` within `FEW_GAP`."""
    assert found.keys() == expected.keys()
    gaps = torch.cat([(found[name] - expected[name]).abs().flatten() for name in found])
    largest = gaps.topk(FEW + 1).values
    assert largest[-1] < updates * WEIGHT_GAP and largest[0] < updates * FEW_GAP, f"{message}: {largest}"
