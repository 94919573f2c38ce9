# SPDX-License-Identifier: Apache-2.0
"""Segmentation, weights and ratios of macro actions by hand."""

import math

import pytest
import torch

from closeness import FORMULA, assert_near
from macro_actions.segments import macro_logprobs, pool_values, segment
from rl_cases import masked_case


def test_segment_by_hand() -> None:
    macro = segment(*masked_case([[2, 1, 3], [1], [], [4]], 1))
    assert macro.index.tolist() == [
        [0, 0, 1, 2, 2, 2, -1],
        [0, -1, -1, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1, -1],
        [0, 0, 0, 0, -1, -1, -1],
    ]
    assert macro.mask.tolist() == [[True] * 3, [True, False, False], [False] * 3, [True, False, False]]
    assert macro.lengths[macro.mask].tolist() == [2, 1, 3, 1, 4]


# position, m = 5: 1/((5-i)·H), H = 1 + 1/2 + 1/3 + 1/4 + 1/5 = 137/60: 12/137, 15/137, 20/137, 30/137, 60/137.
@pytest.mark.parametrize(
    ("value_function", "weights"),
    [
        ("equal", [0.2, 0.2, 0.2, 0.2, 0.2]),
        ("unit", [0.0, 0.0, 0.0, 0.0, 1.0]),
        ("position", [0.088, 0.109, 0.146, 0.219, 0.438]),
        ("first", [1.0, 0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_sigma_of_five_tokens_by_hand(value_function, weights) -> None:
    macro = segment(*masked_case([[5]] * 5))
    found = pool_values(torch.eye(5), macro, value_function)[:, 0]
    assert found.tolist() == pytest.approx(weights, abs=6e-4)  # the paper gives three decimals
    if value_function == "position":
        assert_near(found, [12 / 137, 15 / 137, 20 / 137, 30 / 137, 60 / 137], FORMULA)


@pytest.mark.parametrize("ratio", ["macro", "macro_mean"])
def test_macro_logprobs_gradient_by_hand(ratio) -> None:
    """Tokens weigh 1, 2, 3, 4, 5: each log-prob collects the weights of its whole action, over m for the mean."""
    ends, mask = masked_case([[2, 3]], 1)
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, math.nan]], requires_grad=True)
    found = macro_logprobs(logprobs, segment(ends, mask), ratio)
    found[:, :5].mul(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])).sum().backward()
    expected = [[1.5, 1.5, 4.0, 4.0, 4.0, 0.0]] if ratio == "macro_mean" else [[3.0, 3.0, 12.0, 12.0, 12.0, 0.0]]
    assert_near(logprobs.grad, expected, FORMULA)
    with pytest.raises(ValueError, match="policy_ratio must be one of macro, macro_mean, not 'token'"):
        macro_logprobs(logprobs, segment(ends, mask), "token")
