# SPDX-License-Identifier: Apache-2.0
"""Masked statistics and whitening."""

import math

import torch
from hypothesis import example, given

from closeness import FORMULA, assert_near
from macro_actions.masked import last_true, masked_moments, masked_sum, whiten, whiten_rows
from rl_cases import PADDING, PROPERTY, ROW_LENGTHS, SEEDS, draw, mask_of, width_of


def case(lengths: list[int], padding: int, seed: int, off_mask: float = math.nan) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers (B,R) with a trap off the mask, and the mask."""
    mask = mask_of(lengths, width_of(lengths, padding))
    return draw(mask, seed, off_mask=off_mask), mask


def test_the_last_position_of_each_row() -> None:
    mask = [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]
    last = [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert torch.equal(last_true(torch.tensor(mask).bool()), torch.tensor(last).bool())


@PROPERTY
@given(lengths=ROW_LENGTHS, padding=PADDING, seed=SEEDS)
@example(lengths=[0, 0], padding=2, seed=0)
def test_masked_moments_are_count_sum_and_sum_of_squares(lengths, padding, seed) -> None:
    x, mask = case(lengths, padding, seed)
    kept = x[mask].tolist()
    moments = masked_moments(x, mask)
    assert len(moments) == 3
    for found, expected in zip(moments, (len(kept), sum(kept), sum(v * v for v in kept)), strict=True):
        assert found.dtype == torch.float64 and found.dim() == 0
        assert math.isclose(found.item(), expected, rel_tol=1e-12, abs_tol=1e-12)


def test_whitening_by_hand() -> None:
    """1, 2, 3, 6 have mean 3 and variance 3.5."""
    x = torch.tensor([[1.0, 2.0, 50.0], [3.0, 6.0, 50.0]])
    mask = mask_of([2, 2], 3)
    white = whiten(x, mask, masked_moments(x, mask))
    root = math.sqrt(3.5)
    assert_near(white, [[-2 / root, -1 / root, 0.0], [0.0, 3 / root, 0.0]], FORMULA)


def test_constant_and_empty_batches_stay_finite() -> None:
    constant = torch.full((2, 3), 0.1)
    mask = mask_of([3, 2], 3)
    white = whiten(constant, mask, masked_moments(constant, mask))
    assert_near(white, torch.zeros(2, 3), FORMULA, 0.1 / 1e-4)  # what is left of 0.1 is divided by √1e-8
    x, mask = case([0, 0], 3, 0)
    assert not whiten(x, mask, masked_moments(x, mask)).any()
    assert masked_sum(x, mask) == 0.0


def test_whitening_rows_by_hand() -> None:
    """1, 3 have mean 2 and variance 1; 1, 2, 6 mean 3 and variance 14/3; a single number and equal ones become 0."""
    x = torch.tensor([[1.0, 3.0, math.nan], [1.0, 2.0, 6.0], [5.0, math.nan, 7.0], [0.1, 0.1, 0.1], [math.nan] * 3])
    white = whiten_rows(x, mask_of([2, 3, 1, 3, 0], 3))
    root = math.sqrt(14 / 3)
    assert_near(white, [[-1, 1, 0], [-2 / root, -1 / root, 3 / root], [0, 0, 0], [0, 0, 0], [0, 0, 0]], FORMULA)
    assert white.dtype == torch.float32
