# SPDX-License-Identifier: Apache-2.0
"""The estimators: what they declare, GAE over macro steps, leave-one-out baselines, token-level PPO."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import rl_references as ref
from closeness import FORMULA, assert_near, near
from macro_actions.conditions import fixed
from macro_actions.estimators import ESTIMATORS
from macro_actions.returns import gae
from macro_actions.settings import NEEDS
from macro_actions.types import Rollout, Trajectory
from rl_cases import (
    PADDING,
    PROPERTY,
    ROW_LENGTHS,
    SEEDS,
    VALUE_FUNCTIONS,
    credit_of,
    mask_of,
    normal,
    trajectory_of,
    width_of,
)


@pytest.mark.parametrize("name", sorted({*ESTIMATORS, *NEEDS}))
def test_an_estimator_needs_what_it_declares(name) -> None:
    """Returns for a critic alone; advantages of macro actions or of responses; of a row or of all to its prompt."""
    needs, options = NEEDS[name], {"kl_coef": 0.1, "samples": 3 if NEEDS[name].group else 1}
    trajectory = trajectory_of([6, 5, 4], 6, 0)
    trajectory = trajectory if needs.critic else replace(trajectory, values=None)
    ends, mask = fixed(trajectory.response_mask, 2), trajectory.response_mask
    batch = credit_of(trajectory, ends, name, **options)
    assert (batch.returns is not None) is needs.critic
    alike = torch.where(mask, batch.advantages == batch.advantages[:, :1], True)
    assert bool(alike.all()) is not needs.macro_actions
    other = replace(trajectory, scores=trajectory.scores + torch.tensor([0.0, 9.0, 0.0]))
    first = credit_of(other, ends, name, **options).advantages[0]
    assert torch.equal(first, batch.advantages[0]) is not needs.group


# Values 0.5, 0.25, 1 and rewards 0, -0.5, 2.
# gamma 1, lam 0.5:   delta = -0.25, 0.25, 1;    A3 = 1, A2 = 0.25 + 0.5 = 0.75, A1 = -0.25 + 0.375 = 0.125.
# gamma 0.5, lam 0.5: delta = -0.375, -0.25, 1;  A3 = 1, A2 = -0.25 + 0.25 = 0,  A1 = -0.375.
# gamma 1, lam 1:     returns are the sums of the rewards to come: 1.5, 1.5, 2.
# gamma 1, lam 0:     advantages are the deltas.
@pytest.mark.parametrize(
    ("gamma", "lam", "advantages"),
    [
        (1.0, 0.5, [0.125, 0.75, 1.0]),
        (0.5, 0.5, [-0.375, 0.0, 1.0]),
        (1.0, 1.0, [1.0, 1.25, 1.0]),
        (1.0, 0.0, [-0.25, 0.25, 1.0]),
    ],
)
def test_gae_by_hand(gamma, lam, advantages) -> None:
    values = torch.tensor([[0.5, 0.25, 1.0, math.nan]])
    rewards = torch.tensor([[0.0, -0.5, 2.0, math.inf]])
    found, returns = gae(values, rewards, mask_of([3], 4), gamma, lam)
    assert found[0, :3].tolist() == advantages
    assert returns[0, :3].tolist() == [a + v for a, v in zip(advantages, [0.5, 0.25, 1.0], strict=True)]
    assert torch.isfinite(found).all() and torch.isfinite(returns).all()


@PROPERTY
@given(
    lengths=ROW_LENGTHS,
    padding=PADDING,
    seed=SEEDS,
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    off_mask=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
)
@example(lengths=[0, 0], padding=2, seed=0, gamma=1.0, lam=0.95, off_mask=math.nan)
def test_gae_is_the_double_sum(lengths, padding, seed, gamma, lam, off_mask) -> None:
    width = width_of(lengths, padding)
    mask = mask_of(lengths, width)
    values = normal((len(lengths), width), seed).masked_fill(~mask, off_mask)
    rewards = normal((len(lengths), width), seed + 1).masked_fill(~mask, off_mask)
    advantages, returns = gae(values, rewards, mask, gamma, lam)
    assert torch.isfinite(advantages).all() and torch.isfinite(returns).all()
    assert advantages.dtype == returns.dtype == torch.float32
    for i, length in enumerate(lengths):
        expected = ref.gae(values[i, :length].tolist(), rewards[i, :length].tolist(), gamma, lam)
        assert_near(advantages[i, :length], expected[0])
        assert_near(returns[i, :length], expected[1])


# Of four responses the log-ratios to the reference, and the scores. At a KL coefficient of 0.1 the returns are
# 3 - 0.3 = 2.7, 1 - 0 = 1, 0 - 0.4 = -0.4 and 2 + 0.2 = 2.2, in all 5.5.
LOG_RATIOS = [[1.0, 2.0], [0.5, -1.0, 0.5], [4.0], [0.0, -2.0]]
SCORES = [3.0, 1.0, 0.0, 2.0]


def recorded(padding: int = 1, unscored: tuple[int, ...] = (), finished: tuple[bool, ...] = (True,) * 4) -> Trajectory:
    """The four responses; what lies off them is not finite."""
    lengths = [0 if i in unscored else len(row) for i, row in enumerate(LOG_RATIOS)]
    width = 3 + padding
    logprobs = torch.tensor([row + [math.nan] * (width - len(row)) for row in LOG_RATIOS])
    mask, index = mask_of(lengths, width), torch.arange(4)
    rollout = Rollout(torch.zeros(4, width + 1, dtype=torch.long), mask, mask, index, torch.tensor(finished))
    return Trajectory(rollout, logprobs, torch.zeros(4, width), None, torch.tensor(SCORES))


def advantages_of(trajectory: Trajectory, samples: int, **options) -> list[float]:
    """Of each row, from its first token; all its tokens have the same, and padding has 0."""
    mask = trajectory.response_mask
    batch = credit_of(trajectory, fixed(mask, 2), "rloo", samples=samples, **({"kl_coef": 0.1} | options))
    assert_near(batch.advantages, torch.where(mask, batch.advantages[:, :1], 0.0))
    assert batch.returns is None
    return batch.advantages[:, 0].tolist()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("samples", "advantages"),
    [
        (1, [0.0, 0.0, 0.0, 0.0]),
        (2, [2.7 - 1.0, 1.0 - 2.7, -0.4 - 2.2, 2.2 + 0.4]),
        (4, [2.7 - 2.8 / 3, 1.0 - 4.5 / 3, -0.4 - 5.9 / 3, 2.2 - 3.3 / 3]),
    ],
)
def test_ragged_responses_by_hand(samples, advantages, padding) -> None:
    assert advantages_of(recorded(padding), samples) == near(advantages, FORMULA)


@pytest.mark.parametrize(
    ("options", "returns"),
    [
        ({"kl_coef": 0.0}, [3.0, 1.0, 0.0, 2.0]),
        # d²/2 sums to 2.5, 0.75, 8 and 2
        ({"kl_estimator": "k2"}, [2.75, 0.925, -0.8, 1.8]),
        # the first two responses were cut: 3 - 1 = 2 and 1 - 1 = 0; then scores are held to 1.5
        ({"missing_eos_penalty": 1.0, "clip_reward_value": 1.5}, [1.2, 0.0, -0.4, 1.7]),
    ],
)
def test_the_return_is_the_sum_of_the_token_rewards(options, returns) -> None:
    first, second, third, fourth = returns
    found = advantages_of(recorded(finished=(False, False, True, True)), 2, **options)
    assert found == near([first - second, second - first, third - fourth, fourth - third], FORMULA)


def test_a_response_that_could_not_be_scored_is_no_baseline() -> None:
    found = advantages_of(recorded(unscored=(1,)), 4)
    assert found == near([2.7 - 1.8 / 2, 0.0, -0.4 - 4.9 / 2, 2.2 - 2.3 / 2], FORMULA)
    assert advantages_of(recorded(unscored=(1,)), 2)[:2] == [0.0, 0.0]


def token_ppo(trajectory: Trajectory, kl_coef: float, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Token-level PPO for language models, one row and one token at a time, as the usual implementations loop."""
    advantages = torch.zeros_like(trajectory.values)
    returns = torch.zeros_like(trajectory.values)
    for i, row_mask in enumerate(trajectory.response_mask):
        length = int(row_mask.sum())
        kl = trajectory.logprobs[i, :length] - trajectory.ref_logprobs[i, :length]
        rewards = -kl_coef * kl
        if length:
            rewards[length - 1] += trajectory.scores[i]
        values = trajectory.values[i]
        last_gae = torch.zeros(())
        for t in reversed(range(length)):
            next_value = values[t + 1] if t < length - 1 else torch.zeros(())
            delta = rewards[t] + gamma * next_value - values[t]
            last_gae = delta + gamma * lam * last_gae
            advantages[i, t] = last_gae
        returns[i, :length] = advantages[i, :length] + values[:length]
    return advantages, returns


@PROPERTY
@given(
    value_function=st.sampled_from(VALUE_FUNCTIONS),
    lengths=ROW_LENGTHS,
    padding=PADDING,
    seed=SEEDS,
    gamma=st.sampled_from([0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    how=st.sampled_from(["sum", "mean"]),
)
@example(value_function="equal", lengths=[64, 64, 0, 31], padding=0, seed=1, gamma=0.99, lam=0.95, how="sum")
def test_one_token_per_action_is_token_ppo_to_the_bit(value_function, lengths, padding, seed, gamma, lam, how) -> None:
    trajectory = trajectory_of(lengths, width_of(lengths, padding), seed)
    mask, options = trajectory.response_mask, {"value_function": value_function, "macro_reward": how}
    batch = credit_of(trajectory, fixed(mask, 1), kl_coef=0.05, gamma=gamma, lam=lam, **options)
    advantages, returns = token_ppo(trajectory, 0.05, gamma, lam)
    assert torch.equal(batch.advantages[mask], advantages[mask])
    assert torch.equal(batch.returns[mask], returns[mask])
