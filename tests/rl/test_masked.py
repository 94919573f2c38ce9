# SPDX-License-Identifier: Apache-2.0
"""Masked statistics and whitening."""

import math

import torch

from closeness import FORMULA, assert_near
from macro_actions.masked import last_true, masked_moments, masked_sum, whiten, whiten_rows
from rl_cases import mask_of


def test_the_last_position_of_each_run() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()
    assert last_true(mask).int().tolist() == [[0, 0, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]


def test_whitening_by_hand() -> None:
    """1, 2, 3, 6 have sum 12 and sum of squares 50, so mean 3 and variance 3.5."""
    x = torch.tensor([[1.0, 2.0, math.nan], [3.0, 6.0, math.nan]])
    mask = mask_of([2, 2], 3)
    moments = masked_moments(x, mask)
    assert [float(moment) for moment in moments] == [4.0, 12.0, 50.0]
    assert {moment.dtype for moment in moments} == {torch.float64}
    white = whiten(x, mask, moments)
    root = math.sqrt(3.5)
    assert_near(white, [[-2 / root, -1 / root, 0.0], [0.0, 3 / root, 0.0]], FORMULA)


def test_constant_and_empty_batches_stay_finite() -> None:
    constant = torch.full((2, 3), 0.1)
    mask = mask_of([3, 2], 3)
    white = whiten(constant, mask, masked_moments(constant, mask))
    assert_near(white, torch.zeros(2, 3), FORMULA, 0.1 / 1e-4)  # what is left of 0.1 is divided by √1e-8
    x, mask = torch.full((2, 3), math.nan), mask_of([0, 0], 3)
    assert not whiten(x, mask, masked_moments(x, mask)).any()
    assert masked_sum(x, mask) == 0.0


def test_whitening_rows_by_hand() -> None:
    """1, 3 have mean 2 and variance 1; 1, 2, 6 mean 3 and variance 14/3; a single number and equal ones become 0."""
    x = torch.tensor([[1.0, 3.0, math.nan], [1.0, 2.0, 6.0], [5.0, math.nan, 7.0], [0.1, 0.1, 0.1], [math.nan] * 3])
    white = whiten_rows(x, mask_of([2, 3, 1, 3, 0], 3))
    root = math.sqrt(14 / 3)
    assert_near(white, [[-1, 1, 0], [-2 / root, -1 / root, 3 / root], [0, 0, 0], [0, 0, 0], [0, 0, 0]], FORMULA)
    assert white.dtype == torch.float32
