# SPDX-License-Identifier: Apache-2.0
"""Segmentation, pooling and broadcasting of macro actions against scalar references."""

import math

import pytest
import torch
from hypothesis import example, given

import rl_references as ref
from closeness import FORMULA, assert_near
from macro_actions.losses import loss_count, loss_weights
from macro_actions.segments import macro_logprobs, pool_rewards, pool_values, segment, to_tokens
from rl_cases import PADDING, PROPERTY, SEEDS, SEGMENTS, VALUE_FUNCTIONS, draw, masked_case, normal

EMPTY = [[], []]


def on_actions(pooled: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    """The numbers of the real macro actions of every row of (B,M)."""
    return [row[keep].tolist() for row, keep in zip(pooled, mask, strict=True)]


def assert_rows(pooled: torch.Tensor, mask: torch.Tensor, expected: list[list[float]]) -> None:
    """Real macro actions equal `expected`, row by row; the rest is finite."""
    assert torch.isfinite(pooled).all()
    for row, want in zip(on_actions(pooled, mask), expected, strict=True):
        assert_near(torch.tensor(row), want)


# segment


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


# value functions


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


# rewards


@PROPERTY
@given(segments=SEGMENTS, padding=PADDING, seed=SEEDS)
@example(segments=EMPTY, padding=1, seed=0)
def test_pool_rewards_sums(segments, padding, seed) -> None:
    """Or means weighted by σ."""
    ends, mask = masked_case(segments, padding)
    rewards = draw(mask, seed)
    macro = segment(ends, mask)
    expected = [[sum(c) for c in ref.chunks(rewards[i].tolist(), row)] for i, row in enumerate(segments)]
    assert_rows(pool_rewards(rewards, macro), macro.mask, expected)
    for value_function in VALUE_FUNCTIONS:
        means = [ref.pool(rewards[i].tolist(), row, value_function) for i, row in enumerate(segments)]
        assert_rows(pool_rewards(rewards, macro, "mean", value_function), macro.mask, means)


# back to tokens


@PROPERTY
@given(segments=SEGMENTS, padding=PADDING, seed=SEEDS)
@example(segments=EMPTY, padding=1, seed=0)
def test_to_tokens_broadcasts(segments, padding, seed) -> None:
    ends, mask = masked_case(segments, padding)
    macro = segment(ends, mask)
    per_action = normal(tuple(macro.mask.shape), seed).masked_fill(~macro.mask, math.nan)
    tokens = to_tokens(per_action, macro)
    assert tokens.shape == mask.shape
    expected = [
        ref.broadcast(x, row, mask.shape[1])
        for x, row in zip(on_actions(per_action, macro.mask), segments, strict=True)
    ]
    assert torch.equal(tokens, torch.tensor(expected))


@PROPERTY
@given(segments=SEGMENTS, padding=PADDING)
@example(segments=EMPTY, padding=1)
def test_weights_of_macro_actions_are_one_over_length(segments, padding) -> None:
    ends, mask = masked_case(segments, padding)
    macro = segment(ends, mask)
    expected = [ref.broadcast([1 / n for n in row], row, mask.shape[1]) for row in segments]
    assert_near(loss_weights("macro", macro, mask), expected, FORMULA)
    assert loss_count("macro", macro, mask, 1) == sum(map(len, segments))


@pytest.mark.parametrize("mean", [False, True])
def test_macro_logprobs_gradient_by_hand(mean) -> None:
    """Tokens weigh 1, 2, 3, 4, 5: each log-prob collects the weights of its whole action, over m for the mean."""
    ends, mask = masked_case([[2, 3]], 1)
    logprobs = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, math.nan]], requires_grad=True)
    found = macro_logprobs(logprobs, segment(ends, mask), mean)
    found[:, :5].mul(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])).sum().backward()
    expected = [[1.5, 1.5, 4.0, 4.0, 4.0, 0.0]] if mean else [[3.0, 3.0, 12.0, 12.0, 12.0, 0.0]]
    assert_near(logprobs.grad, expected, FORMULA)
