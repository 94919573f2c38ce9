# SPDX-License-Identifier: Apache-2.0
"""Advantages and returns in other ways than the product's, composed from its pure functions.

Each takes what `dschat.trainers.ppo.credit.assign_credit` takes. What it says of tokens alone is token PPO: the same
function with macro actions of one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dschat.config.ppo import PPOConfig
from dschat.rl.estimators import gae
from dschat.rl.macro_actions import pool_rewards, pool_values, segment, to_tokens
from dschat.rl.masked import last_true
from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import MacroActions, PPOBatch, Trajectory
from dschat.trainers.credit import assign_credit

Estimator = Callable[[Trajectory, MacroActions, float, PPOConfig], PPOBatch]

HORIZONS = (1, 5, math.inf)  # of the mixture


def values_of(trajectory: Trajectory) -> Tensor:
    """(B, R): the values of the critic, which every run of the benchmark has."""
    assert trajectory.values is not None
    return trajectory.values


def value_only(trajectory: Trajectory, macro: MacroActions, kl_coef: float, config: PPOConfig) -> PPOBatch:
    """GAE over tokens on V'_j = V_τ(j): every token has its macro action's value."""
    values = to_tokens(pool_values(values_of(trajectory), macro, config.value_function), macro)
    batch = _tokens(replace(trajectory, values=values), kl_coef, config)
    return replace(batch, trajectory=trajectory, macro=macro)


def reward_only(trajectory: Trajectory, macro: MacroActions, kl_coef: float, config: PPOConfig) -> PPOBatch:
    """GAE over tokens on rewards that all fall on the last token of their macro action."""
    batch = _tokens(trajectory, kl_coef, config)
    sums = to_tokens(pool_rewards(batch.rewards, macro), macro)
    last = torch.cat(
        [macro.index[:, 1:] != macro.index[:, :-1], torch.ones_like(macro.index[:, :1], dtype=torch.bool)], 1
    )
    rewards = torch.where(last & batch.response_mask, sums, 0.0)
    advantages, returns = gae(values_of(trajectory), rewards, batch.response_mask, config.gamma, config.lam)
    return replace(batch, macro=macro, advantages=advantages, returns=returns)


def ratio_only(trajectory: Trajectory, macro: MacroActions, kl_coef: float, config: PPOConfig) -> PPOBatch:
    """Advantages and returns of token PPO; the macro actions are left to --policy_ratio."""
    return replace(_tokens(trajectory, kl_coef, config), macro=macro)


def mixture(trajectory: Trajectory, macro: MacroActions, kl_coef: float, config: PPOConfig) -> PPOBatch:
    """The mean over macro actions of several lengths."""
    mask = trajectory.response_mask
    cuts = [segment(fixed_ngram_ends(mask, ngram), mask) for ngram in HORIZONS]
    batches = [assign_credit(trajectory, cut, kl_coef, config) for cut in cuts]
    advantages = torch.stack([batch.advantages for batch in batches]).mean(0)
    returns = torch.stack([batch.returns for batch in batches if batch.returns is not None]).mean(0)
    return replace(batches[0], macro=macro, advantages=advantages, returns=returns)


def token_lambda(trajectory: Trajectory, macro: MacroActions, kl_coef: float, config: PPOConfig) -> PPOBatch:
    """GAE over tokens, where a token of a macro action of m tokens has λ^(1/m)."""
    batch = _tokens(trajectory, kl_coef, config)
    lam = config.lam ** (1 / to_tokens(macro.lengths, macro).clamp(min=1))
    values, mask = values_of(trajectory), batch.response_mask
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    following = torch.where(last_true(mask), 0.0, following)
    deltas = torch.where(mask, batch.rewards + config.gamma * following - values, 0.0)
    advantages, running = torch.zeros_like(values), values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        running = deltas[:, step] + config.gamma * lam[:, step] * running
        advantages[:, step] = running
    return replace(batch, macro=macro, advantages=advantages, returns=torch.where(mask, advantages + values, 0.0))


def decoupled(trajectory: Trajectory, macro: MacroActions, kl_coef: float, config: PPOConfig) -> PPOBatch:
    """The critic learns the return at λ = 1, free of its own errors; advantages keep --lam (VC-PPO, 2025)."""
    batch = assign_credit(trajectory, macro, kl_coef, config)
    return replace(batch, returns=assign_credit(trajectory, macro, kl_coef, replace(config, lam=1.0)).returns)


ESTIMATORS: dict[str, Estimator] = {
    "product": assign_credit,
    "value_only": value_only,
    "reward_only": reward_only,
    "ratio_only": ratio_only,
    "mixture": mixture,
    "token_lambda": token_lambda,
    "decoupled": decoupled,
}


def _tokens(trajectory: Trajectory, kl_coef: float, config: PPOConfig) -> PPOBatch:
    """Token PPO."""
    mask = trajectory.response_mask
    return assign_credit(trajectory, segment(mask, mask), kl_coef, config)
