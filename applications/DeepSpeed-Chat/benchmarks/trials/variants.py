# SPDX-License-Identifier: Apache-2.0
"""Estimators and termination conditions that the product does not have, composed from its pure functions.

Estimators have the signature of `macro_actions.estimators`; token PPO is GAE with macro actions of one token. The
conditions `value_changes` and `shrinking` fit the product's hook for users' functions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.models.engines import PolicyEngine
from macro_actions.conditions import fixed
from macro_actions.estimators import Estimator, EstimatorSettings, gae, gae_batch
from macro_actions.masked import last_true
from macro_actions.segments import pool_rewards, pool_values, segment, to_tokens
from macro_actions.types import MacroActions, PPOBatch, ScoredRollout, Trajectory

HORIZONS = (1, 5, math.inf)  # of the mixture
MEAN_LENGTH = 5  # tokens of a macro action
LONGEST = 10
ENOUGH = 0.4  # explained variance at mid-response with which macro actions are tokens


def values_of(trajectory: Trajectory) -> Tensor:
    """(B, R): the values of the critic, which every run of the benchmark has."""
    assert trajectory.values is not None
    return trajectory.values


def value_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE over tokens on V'_j = V_τ(j): every token has its macro action's value."""
    values = to_tokens(pool_values(values_of(trajectory), macro, settings.value_function), macro)
    batch = _tokens(replace(trajectory, values=values), settings)
    return replace(batch, trajectory=trajectory, macro=macro)


def reward_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE over tokens on rewards that all fall on the last token of their macro action."""
    batch = _tokens(trajectory, settings)
    sums = to_tokens(pool_rewards(batch.rewards, macro), macro)
    last = torch.ones_like(macro.index, dtype=torch.bool)
    last[:, :-1] = macro.index[:, 1:] != macro.index[:, :-1]
    rewards = torch.where(last & batch.response_mask, sums, 0.0)
    advantages, returns = gae(values_of(trajectory), rewards, batch.response_mask, settings.gamma, settings.lam)
    return replace(batch, macro=macro, advantages=advantages, returns=returns)


def ratio_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Advantages and returns of token PPO; the macro actions are left to --policy_ratio."""
    return replace(_tokens(trajectory, settings), macro=macro)


def mixture(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """The mean over macro actions of several lengths."""
    mask = trajectory.response_mask
    cuts = [segment(fixed(mask, ngram), mask) for ngram in HORIZONS]
    batches = [gae_batch(trajectory, cut, settings) for cut in cuts]
    advantages = torch.stack([batch.advantages for batch in batches]).mean(0)
    returns = torch.stack([batch.returns for batch in batches if batch.returns is not None]).mean(0)
    return replace(batches[0], macro=macro, advantages=advantages, returns=returns)


def token_lambda(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE over tokens, where a token of a macro action of m tokens has λ^(1/m)."""
    batch = _tokens(trajectory, settings)
    lam = settings.lam ** (1 / to_tokens(macro.lengths, macro).clamp(min=1))
    values, mask = values_of(trajectory), batch.response_mask
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    following = torch.where(last_true(mask), 0.0, following)
    deltas = torch.where(mask, batch.rewards + settings.gamma * following - values, 0.0)
    advantages, running = torch.zeros_like(values), values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        running = deltas[:, step] + settings.gamma * lam[:, step] * running
        advantages[:, step] = running
    return replace(batch, macro=macro, advantages=advantages, returns=torch.where(mask, advantages + values, 0.0))


def decoupled(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """The critic learns the return at λ = 1, free of its own errors; advantages keep --lam (VC-PPO, 2025)."""
    batch = gae_batch(trajectory, macro, settings)
    return replace(batch, returns=gae_batch(trajectory, macro, replace(settings, lam=1.0)).returns)


ESTIMATORS: dict[str, Estimator] = {
    "value_only": value_only,
    "reward_only": reward_only,
    "ratio_only": ratio_only,
    "mixture": mixture,
    "token_lambda": token_lambda,
    "decoupled": decoupled,
}


def _tokens(trajectory: Trajectory, settings: EstimatorSettings) -> PPOBatch:
    """Token PPO."""
    mask = trajectory.response_mask
    return gae_batch(trajectory, segment(mask, mask), settings)


def value_changes(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Cuts where the critic's value changes most: behind one token in `MEAN_LENGTH`."""
    values, mask = values_of(trajectory), trajectory.response_mask
    change = torch.zeros_like(values)
    change[:, :-1] = (values[:, 1:] - values[:, :-1]).abs()
    return cut_at_highest(torch.where(mask & ~last_true(mask), change, -1.0), mask)


def shrinking(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Every n tokens, where n falls from `LONGEST` to 1 as the critic's explained variance grows to `ENOUGH`."""
    mask, rows = trajectory.response_mask, torch.arange(len(trajectory.scores))
    middle = values_of(trajectory)[rows, mask.sum(1) // 2]
    share = min(max(explained_variance(middle, trajectory.scores) / ENOUGH, 0.0), 1.0)
    return fixed(mask, round(LONGEST - share * (LONGEST - 1)))


def high_entropy(trajectory: Trajectory | ScoredRollout, reference: PolicyEngine) -> Tensor:
    """Cuts before the tokens of which the reference was least sure: one in `MEAN_LENGTH`. Ends (B, R)."""
    rollout, mask = trajectory.rollout, trajectory.response_mask
    with torch.no_grad():
        _, entropy = reference(rollout.input_ids, rollout.attention_mask, mask.shape[1])
    before = torch.full_like(entropy, -1.0)
    before[:, :-1] = torch.where(mask[:, 1:], entropy[:, 1:], -1.0)
    return cut_at_highest(before, mask)


def cut_at_highest(x: Tensor, mask: Tensor) -> Tensor:
    """Ends (B, R) behind the tokens with the highest numbers, one in `MEAN_LENGTH` of each row, and at its end."""
    wanted = (mask.sum(1) / MEAN_LENGTH).ceil().long() - 1
    rank = x.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return ((rank < wanted[:, None]) & mask) | last_true(mask)


def explained_variance(predicted: Tensor, true: Tensor) -> float:
    """1 − Var(true − predicted) / Var(true); both (N,)."""
    return float(1 - (true - predicted).var() / true.var())
