# SPDX-License-Identifier: Apache-2.0
"""Truncated importance weights, by hand."""

import math

import torch

from closeness import FORMULA, assert_near
from dschat.rl.importance import importance_weights


def test_the_weight_is_the_ratio_of_the_probabilities_up_to_the_clip() -> None:
    """Probabilities 0.3 and 0.6 under the actor, 0.2 and 0.1 where they were drawn: 1.5, and 6 cut to 2."""
    own = torch.tensor([[0.3, 0.6], [0.1, 0.5]]).log()
    drawn = torch.tensor([[0.2, 0.1], [0.4, 0.5]]).log()
    expected = torch.tensor([[1.5, 2.0], [0.25, 1.0]])
    assert_near(importance_weights(own, drawn, 2.0), expected, FORMULA)


def test_padding_weighs_one_and_nothing_is_differentiated() -> None:
    own = torch.zeros(1, 3, requires_grad=True)
    weights = importance_weights(own, torch.zeros(1, 3), 5.0)
    assert weights.tolist() == [[1.0, 1.0, 1.0]] and not weights.requires_grad


def test_advantages_times_weights_have_the_actors_mean() -> None:
    """Σ_y π_drawn(y) w(y) Â(y) = Σ_y π_old(y) Â(y), where nothing is cut."""
    own, drawn = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.5, 0.3, 0.2]])
    advantages = torch.tensor([[1.0, -2.0, 3.0]])
    weighted = (drawn * importance_weights(own.log(), drawn.log(), math.inf) * advantages).sum()
    assert_near(weighted, torch.tensor(0.7 * 1 - 0.2 * 2 + 0.1 * 3), FORMULA)
