# SPDX-License-Identifier: Apache-2.0
"""One token per macro action is token-level PPO, which is written here independently."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import Trajectory
from rl_cases import (
    PADDING,
    PROPERTY,
    ROW_LENGTHS,
    SEEDS,
    VALUE_FUNCTIONS,
    credit_of,
    trajectory_of,
    width_of,
)


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


@pytest.mark.parametrize("value_function", VALUE_FUNCTIONS)
@PROPERTY
@given(
    lengths=ROW_LENGTHS,
    padding=PADDING,
    seed=SEEDS,
    gamma=st.sampled_from([0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    macro_reward=st.sampled_from(["sum", "mean"]),
)
@example(lengths=[64, 64, 0, 31], padding=0, seed=1, gamma=0.99, lam=0.95, macro_reward="sum")
def test_one_token_per_action_is_token_ppo_to_the_bit(
    value_function, lengths, padding, seed, gamma, lam, macro_reward
) -> None:
    trajectory = trajectory_of(lengths, width_of(lengths, padding), seed)
    mask = trajectory.response_mask
    batch = credit_of(
        trajectory,
        fixed_ngram_ends(mask, 1),
        kl_coef=0.05,
        gamma=gamma,
        lam=lam,
        value_function=value_function,
        macro_reward=macro_reward,
    )
    advantages, returns = token_ppo(trajectory, 0.05, gamma, lam)
    assert torch.equal(batch.advantages[mask], advantages[mask])
    assert torch.equal(batch.returns[mask], returns[mask])
