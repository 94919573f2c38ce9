# SPDX-License-Identifier: Apache-2.0
"""Estimators and termination conditions that the package does not have, composed from its pure functions.

Estimators have the signature of those in `macro_actions.estimators`; token-level PPO is GAE with macro actions of one
token. The conditions are user functions for --termination_condition.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from macro_actions.conditions import fixed
from macro_actions.estimators import Estimator, EstimatorSettings, gae, gae_batch
from macro_actions.masked import last_true
from macro_actions.segments import pool_rewards, pool_values, segment, to_tokens
from macro_actions.types import MacroActions, PPOBatch, Trajectory

HORIZONS = (1, 5, math.inf)  # lengths of the macro actions of `mixture`
MEAN_LENGTH = 5  # mean length of a macro action in tokens
LONGEST = 10
ENOUGH = 0.4  # explained variance at mid-response from which on macro actions are single tokens
REFERENCE_MODEL = "MA_RLHF_RESEARCH_REFERENCE"  # variable with the folder that `high_entropy` reads


def critic_values(trajectory: Trajectory) -> Tensor:
    """The critic's values, shape (B, R), which every run with a variant has."""
    assert trajectory.values is not None
    return trajectory.values


def value_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE over tokens on V'_j = V_τ(j): every token has its macro action's value."""
    values = to_tokens(pool_values(critic_values(trajectory), macro, settings.value_function), macro)
    batch = _token_ppo(replace(trajectory, values=values), settings)
    return replace(batch, trajectory=trajectory, macro=macro)


def reward_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE over tokens on rewards that all fall on the last token of their macro action."""
    batch = _token_ppo(trajectory, settings)
    sums = to_tokens(pool_rewards(batch.rewards, macro), macro)
    last = torch.ones_like(macro.index, dtype=torch.bool)
    last[:, :-1] = macro.index[:, 1:] != macro.index[:, :-1]
    rewards = torch.where(last & batch.response_mask, sums, 0.0)
    advantages, returns = gae(
        critic_values(trajectory),
        rewards,
        batch.response_mask,
        settings.gamma,
        settings.lam,
    )
    return replace(batch, macro=macro, advantages=advantages, returns=returns)


def ratio_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Advantages and returns of token-level PPO; the macro actions are left to --policy_ratio."""
    return replace(_token_ppo(trajectory, settings), macro=macro)


def mixture(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Mean of the advantages and returns over macro actions of several lengths."""
    mask = trajectory.response_mask
    advantages = []
    returns = []
    for ngram in HORIZONS:
        batch = gae_batch(trajectory, segment(fixed(mask, ngram), mask), settings)
        assert batch.returns is not None
        advantages.append(batch.advantages)
        returns.append(batch.returns)
    return replace(
        _token_ppo(trajectory, settings),
        macro=macro,
        advantages=torch.stack(advantages).mean(0),
        returns=torch.stack(returns).mean(0),
    )


def token_lambda(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE over tokens, with λ^(1/m) at a token of a macro action of m tokens."""
    batch = _token_ppo(trajectory, settings)
    mask = batch.response_mask
    values = critic_values(trajectory)
    lam = settings.lam ** (1 / to_tokens(macro.lengths, macro).clamp(min=1))
    following = torch.cat(
        [values[:, 1:], torch.zeros_like(values[:, :1])],
        1,
    )
    following = torch.where(last_true(mask), 0.0, following)
    deltas = torch.where(mask, batch.rewards + settings.gamma * following - values, 0.0)
    advantages = torch.zeros_like(values)
    running = values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        running = deltas[:, step] + settings.gamma * lam[:, step] * running
        advantages[:, step] = running
    returns = torch.where(mask, advantages + values, 0.0)
    return replace(batch, macro=macro, advantages=advantages, returns=returns)


def decoupled(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE whose critic learns the return at λ = 1, free of its own errors; advantages keep --lam (VC-PPO, 2025)."""
    batch = gae_batch(trajectory, macro, settings)
    unbiased = gae_batch(trajectory, macro, replace(settings, lam=1.0))
    return replace(batch, returns=unbiased.returns)


VARIANTS: dict[str, Estimator] = {
    "value_only": value_only,
    "reward_only": reward_only,
    "ratio_only": ratio_only,
    "mixture": mixture,
    "token_lambda": token_lambda,
    "decoupled": decoupled,
}


def _token_ppo(trajectory: Trajectory, settings: EstimatorSettings) -> PPOBatch:
    mask = trajectory.response_mask
    return gae_batch(trajectory, segment(mask, mask), settings)


# ---- Termination conditions ----


def value_changes(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Ends (B, R) where the critic's value changes most: behind one token in MEAN_LENGTH."""
    mask = trajectory.response_mask
    values = critic_values(trajectory)
    change = torch.zeros_like(values)
    change[:, :-1] = (values[:, 1:] - values[:, :-1]).abs()
    return cut_at_highest(torch.where(mask & ~last_true(mask), change, -1.0), mask)


def shrinking(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Ends (B, R) every n tokens; n falls from LONGEST to 1 as the critic's explained variance grows to ENOUGH."""
    mask = trajectory.response_mask
    rows = torch.arange(len(trajectory.scores))
    middle = critic_values(trajectory)[rows, mask.sum(1) // 2]
    progress = explained_variance(middle, trajectory.scores) / ENOUGH
    progress = min(max(progress, 0.0), 1.0)
    return fixed(mask, round(LONGEST - progress * (LONGEST - 1)))


def high_entropy(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Ends (B, R) before the tokens of which the reference model was least sure: one in MEAN_LENGTH."""
    mask = trajectory.response_mask
    rollout = trajectory.rollout
    reference = _reference(os.environ[REFERENCE_MODEL], tokenizer)
    with torch.no_grad():
        _, entropy = reference(rollout.input_ids, rollout.attention_mask, mask.shape[1])
    before = torch.full_like(entropy, -1.0)
    before[:, :-1] = torch.where(
        mask[:, 1:],
        entropy[:, 1:],
        -1.0,
    )
    return cut_at_highest(before, mask)


@cache
def _reference(folder: str, tokenizer: PreTrainedTokenizerBase) -> PolicyModel:
    return PolicyModel(load_causal_lm(folder, REFERENCE_MODEL, torch.float32, tokenizer)).eval()


def cut_at_highest(x: Tensor, mask: Tensor) -> Tensor:
    """Ends (B, R) behind the highest numbers of each row, one token in MEAN_LENGTH, and at the end of the row."""
    wanted = (mask.sum(1) / MEAN_LENGTH).ceil().long() - 1
    order = x.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return ((rank < wanted[:, None]) & mask) | last_true(mask)


def explained_variance(predicted: Tensor, true: Tensor) -> float:
    """1 − Var(true − predicted) / Var(true), for two tensors of shape (N,)."""
    return float(1 - (true - predicted).var() / true.var())
