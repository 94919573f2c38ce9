# SPDX-License-Identifier: Apache-2.0
"""Credit over the turns of episodes by hand; baselines by turn are unbiased."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from closeness import FORMULA, assert_near
from macro_actions.estimators import ESTIMATORS, EstimatorSettings
from macro_actions.groups import rloo_turns
from macro_actions.masked import last_of_row, last_true, widths
from macro_actions.segments import segment
from macro_actions.types import PPOBatch, Rollout, Trajectory, join, trim, without_responses

# Two turns of two tokens and one token with two of the environment's between them; one turn; two turns of one token.
MASK = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]).bool()
TURN_REWARDS = torch.tensor([[0.0, 1.0, 0, 0, 4.0], [0.0, 2.0, 0, 0, 0], [3.0, 0, 5.0, 0, 0]])
CUT = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]).bool()


def episodes(
    rewards: Tensor = TURN_REWARDS, mask: Tensor = MASK, cut: Tensor | None = None, values: Tensor | None = None
) -> Trajectory:
    """Episodes with these turn rewards, whose policy is the reference; what lies off the mask is not finite."""
    rows, width = mask.shape
    is_episode = torch.arange(width)[None, :] < widths(mask)[:, None]
    rollout = Rollout(
        input_ids=torch.arange(rows * (width + 1)).view(rows, width + 1),
        attention_mask=torch.cat([torch.ones(rows, 1, dtype=torch.bool), is_episode], 1),
        response_mask=mask,
        prompt_index=torch.zeros(rows, dtype=torch.long),
        finished=torch.zeros(rows, dtype=torch.bool),
        cut_turns=torch.zeros_like(mask) if cut is None else cut,
    )
    zeros = torch.where(mask, 0.0, math.nan)
    return Trajectory(rollout, zeros, zeros, values, rewards.sum(1), rewards)


def batch_of(trajectory: Trajectory, estimator: str, **settings: Any) -> PPOBatch:
    macro = segment(last_true(trajectory.response_mask), trajectory.response_mask)
    return ESTIMATORS[estimator](trajectory, macro, EstimatorSettings(**settings))


def test_the_last_token_and_the_width_of_a_row_with_holes() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]).bool()
    assert last_of_row(mask).long().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert widths(mask).tolist() == [4, 0, 2]
    assert widths(mask[:, :0]).tolist() == [0, 0, 0]


def test_a_missing_end_is_punished_in_its_turn() -> None:
    trajectory = episodes(cut=CUT)
    batch = batch_of(trajectory, "reinforce_pp", missing_eos_penalty=0.5)
    assert batch.rewards.tolist() == [[0, 0.5, 0, 0, 3.5], [0, 2, 0, 0, 0], [3, 0, 4.5, 0, 0]]
    batch = batch_of(trajectory, "rloo", missing_eos_penalty=0.5, samples=3)
    # Returns 4, 2 and 7.5.
    assert_near(batch.advantages[:, 0], [4 - 4.75, 2 - 5.75, 7.5 - 3.0], FORMULA)
    # Not finished: the environment was not done. That is no missing EOS.
    assert batch_of(episodes(), "reinforce_pp", missing_eos_penalty=0.5).rewards.tolist() == TURN_REWARDS.tolist()


def test_the_length_penalty_counts_the_environments_tokens() -> None:
    """Of at most 6 tokens, and over the last 4: an episode of 5 has 3 too many, one of 2 none and one of 3 one."""
    options = {"longest": 6, "length_buffer": 4, "length_penalty": 4.0}
    batch = batch_of(episodes(), "reinforce_pp", **options)
    assert batch.rewards.sum(1).tolist() == [5.0 - 3.0, 2.0, 8.0 - 1.0]


def test_gae_over_turns_by_hand() -> None:
    """V before the turns .5 and 2, rewards 1 and 4, γ = .5, λ = .8.

    δ₂ = 4 − 2 = 2 and δ₁ = 1 + .5 · 2 − .5 = 1.5; Â₂ = 2 and Â₁ = 1.5 + .4 · 2 = 2.3.
    """
    values = torch.where(MASK, 7.0, math.nan)
    values[0, 0], values[0, 4] = 0.5, 2.0
    batch = batch_of(episodes(values=values), "gae", gamma=0.5, lam=0.8, value_function="first")
    assert_near(batch.advantages[0], [2.3, 2.3, 0, 0, 2.0], FORMULA)
    assert batch.returns is not None
    assert_near(batch.returns[0], [2.8, 2.8, 0, 0, 4.0], FORMULA)
    assert not batch.advantages[~MASK].any()


def test_baselines_by_turn_by_hand() -> None:
    """Returns 3 1, 2 and 7 5 of responses with 2, 1 and 2 turns; and of two with 1 and 2 turns, 4 and 6 2."""
    returns = torch.tensor([[[3.0, 1.0], [2.0, math.nan], [7.0, 5.0]]])
    reached = torch.tensor([[[1, 1], [1, 0], [1, 1]]]).bool()
    assert_near(rloo_turns(returns, reached), [[[3 - 4.5, 1 - 5.0], [2 - 5.0, 0], [7 - 2.5, 5 - 1.0]]], FORMULA)
    # No other response has a second turn: its baseline is the other's whole return.
    returns = torch.tensor([[[4.0, math.nan], [6.0, 2.0]]])
    reached = torch.tensor([[[1, 0], [1, 1]]]).bool()
    assert_near(rloo_turns(returns, reached), [[[4 - 6.0, 0], [6 - 4.0, 2 - 4.0]]], FORMULA)
    # A response that could not be scored has no turns, and one alone has nothing to be compared with.
    reached = torch.tensor([[[0, 0], [1, 1]]]).bool()
    assert not rloo_turns(returns, reached).any()


def test_the_estimator_puts_returns_from_turns_on_their_tokens() -> None:
    """γ = .5: returns 1 + .5 · 4 = 3 and 4; 2; 3 + .5 · 5 = 5.5 and 5."""
    batch = batch_of(episodes(), "rloo_turns", gamma=0.5, samples=3)
    first, second, third = 3 - 3.75, 2 - 4.25, 5.5 - 2.5
    expected = [[first, first, 0, 0, 4 - 5.0], [second, second, 0, 0, 0], [third, 0, 5 - 4.0, 0, 0]]
    assert_near(batch.advantages, expected, FORMULA)
    assert batch.returns is None
    with pytest.raises(ValueError, match="3 rows are not 2 samples"):
        batch_of(episodes(), "rloo_turns", samples=2)


def test_with_one_turn_each_it_is_rloo() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    rewards = torch.tensor([[0.0, 1.5, 0], [0, 0, 2.25], [4.0, 0, 0], [0, 0, 0]])
    trajectory = episodes(rewards, mask)
    by_turn = batch_of(trajectory, "rloo_turns", samples=4)
    assert torch.equal(by_turn.advantages, batch_of(trajectory, "rloo", samples=4).advantages)


# An episode ends at once with reward .3, or goes on with reward .1 to a second choice, of reward 0 or 1.
GOES_ON, CHOOSES = 0.4, 0.7  # probabilities of going on, and of the better choice
OUTCOMES = [("stop",), ("on", "worse"), ("on", "better")]
REWARDS = {"stop": 0.3, "on": 0.1, "worse": 0.0, "better": 1.0}
PROBABILITIES = [1 - GOES_ON, GOES_ON * (1 - CHOOSES), GOES_ON * CHOOSES]
# ∂ log π / ∂ (logit of going on, logit of the better choice).
SCORES = {
    "stop": torch.tensor([-GOES_ON, 0.0], dtype=torch.float64),
    "on": torch.tensor([1 - GOES_ON, 0.0], dtype=torch.float64),
    "worse": torch.tensor([0.0, -CHOOSES], dtype=torch.float64),
    "better": torch.tensor([0.0, 1 - CHOOSES], dtype=torch.float64),
}


def expected_gradient(samples: int) -> Tensor:
    """E[(1/K) Σ_k Σ_h Â_k,h ∇ log π] over all groups of K episodes, each with its probability; (2,)."""
    total = torch.zeros(2, dtype=torch.float64)
    for group in product(range(3), repeat=samples):
        returns = torch.zeros(1, samples, 2, dtype=torch.float64)
        reached = torch.zeros(1, samples, 2, dtype=torch.bool)
        for sample, outcome in enumerate(group):
            rewards = [REWARDS[action] for action in OUTCOMES[outcome]]
            for turn in range(len(rewards)):
                returns[0, sample, turn] = sum(rewards[turn:])
                reached[0, sample, turn] = True
        advantages = rloo_turns(returns, reached)
        probability = math.prod(PROBABILITIES[outcome] for outcome in group)
        for sample, outcome in enumerate(group):
            for turn, action in enumerate(OUTCOMES[outcome]):
                total += probability / samples * advantages[0, sample, turn] * SCORES[action]
    return total


# J = .6 · .3 + .4 · (.1 + .7): ∂J/∂θ₁ = .4 · .6 · (.8 − .3) = .12 and ∂J/∂θ₂ = .4 · .7 · .3 = .084.
GRADIENT = [0.12, 0.084]


def test_baselines_by_turn_are_unbiased() -> None:
    assert expected_gradient(3).tolist() == pytest.approx(GRADIENT, rel=1e-12)


def test_rows_with_holes_are_joined_trimmed_and_emptied() -> None:
    rollout = episodes(cut=CUT).rollout
    both = join([trim(rollout, 5), rollout], 0)
    assert both.cut_turns is not None and torch.equal(both.cut_turns, CUT.repeat(2, 1))
    emptied = without_responses(rollout, torch.tensor([True, False, False]))
    assert emptied.response_runs() == [[], *rollout.response_runs()[1:]]
    assert emptied.cut_turns is not None and not emptied.cut_turns[0].any()
    assert emptied.attention_mask[0].tolist() == [True] + [False] * 5
