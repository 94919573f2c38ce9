# SPDX-License-Identifier: Apache-2.0
"""Estimators and termination conditions that the package does not have, composed from its pure functions.

Estimators have the signature of those in `macro_actions.estimators`; token-level PPO is GAE with macro actions of one
token. Some of them compute with macro actions of their own. The batch that they return has the run's macro actions
again, which --policy_ratio uses. The conditions are user functions for --termination_condition.

Shapes: B rows, R response positions, T response tokens in the longest row. In the formulas token j belongs to macro
action τ(j), which has m_j tokens.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.training.ppo.metrics import explained_variance
from macro_actions.conditions import fixed
from macro_actions.estimators import Estimator, EstimatorSettings, gae_batch, macro_gae
from macro_actions.masked import last_true
from macro_actions.segments import on_last_tokens, pool_rewards, pool_values, segment, to_tokens
from macro_actions.types import MacroActions, PPOBatch, Trajectory

MIXTURE_LENGTHS = (1, 5, math.inf)  # tokens per macro action; infinity is one macro action per response
MEAN_LENGTH = 5  # mean length, in tokens, of the macro actions of `value_changes` and `high_entropy`
LONGEST_MACRO_ACTION = 10  # tokens per macro action of `shrinking` while the critic explains nothing
GOOD_EXPLAINED_VARIANCE = 0.4  # from here on, the macro actions of `shrinking` are single tokens
REFERENCE_MODEL = "MA_RLHF_RESEARCH_REFERENCE"  # variable with the folder that `high_entropy` reads


def critic_values(trajectory: Trajectory) -> Tensor:
    """The critic's values, shape (B, R). Runs with a variant always have a critic."""
    assert trajectory.values is not None
    return trajectory.values


# ---- Estimators ----


def _token_ppo(trajectory: Trajectory, settings: EstimatorSettings) -> PPOBatch:
    return gae_batch(trajectory, _single_tokens(trajectory.response_mask), settings)


def _single_tokens(mask: Tensor) -> MacroActions:
    """Macro actions of one token each. Pooling over them moves the tokens of a row to its front, without holes."""
    return segment(mask, mask)


def value_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE over tokens, where every token has the value of its macro action: V'_j = V_τ(j).

    Example: values .5 .3 .1 .2 and macro actions of two tokens give the values .4 .4 .15 .15.
    """
    values = to_tokens(pool_values(critic_values(trajectory), macro, settings.value_function), macro)
    batch = _token_ppo(replace(trajectory, values=values), settings)
    return replace(batch, trajectory=trajectory, macro=macro)


def reward_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE over tokens, where the rewards of a macro action are moved to its last token.

    Example: rewards −.1 −.1 −.1 1.9 and macro actions of two tokens give the rewards 0 −.2 0 1.8.
    """
    batch = _token_ppo(trajectory, settings)
    mask = batch.response_mask
    rewards = on_last_tokens(pool_rewards(batch.rewards, macro), macro)
    advantages, returns = macro_gae(critic_values(trajectory), rewards, mask, mask, settings.gamma, settings.lam)
    return replace(batch, macro=macro, advantages=advantages, returns=returns)


def ratio_only(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Advantages and returns of token-level PPO; only --policy_ratio uses the macro actions."""
    return replace(_token_ppo(trajectory, settings), macro=macro)


def mixture(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Mean of the advantages and returns, (B, R) each, over macro actions of several lengths."""
    mask = trajectory.response_mask
    advantages = []
    returns = []
    for length in MIXTURE_LENGTHS:
        batch = gae_batch(trajectory, segment(fixed(mask, length), mask), settings)
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
    """GAE over tokens, where λ of a token depends on the length of its macro action.

        δ_j = r_j + γ V_{j+1} − V_j        Â_j = δ_j + γ λ^(1/m_j) Â_{j+1}        Ret_j = Â_j + V_j

    A macro action therefore multiplies later advantages by λ, as one step of GAE over macro actions does. The loop is
    written out because `macro_actions.estimators.gae` takes one λ per row.
    """
    batch = _token_ppo(trajectory, settings)
    tokens = _single_tokens(batch.response_mask)

    # λ, V and δ of each response token, shape (B, T).
    lengths = pool_values(to_tokens(macro.lengths, macro), tokens)
    lam = settings.lam ** (1 / lengths.clamp(min=1))
    values = pool_values(critic_values(trajectory), tokens)
    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    deltas = pool_rewards(batch.rewards, tokens) + settings.gamma * next_values - values

    advantages = torch.zeros_like(values)
    running = values.new_zeros(len(values))
    for step in reversed(range(values.shape[1])):
        running = deltas[:, step] + settings.gamma * lam[:, step] * running
        advantages[:, step] = running
    returns = to_tokens(advantages + values, tokens)
    return replace(batch, macro=macro, advantages=to_tokens(advantages, tokens), returns=returns)


def decoupled(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GAE whose critic learns the return at λ = 1, which contains no value; advantages keep --lam (VC-PPO, 2025)."""
    batch = gae_batch(trajectory, macro, settings)
    without_values = gae_batch(trajectory, macro, replace(settings, lam=1.0))
    return replace(batch, returns=without_values.returns)


VARIANTS: dict[str, Estimator] = {
    "value_only": value_only,
    "reward_only": reward_only,
    "ratio_only": ratio_only,
    "mixture": mixture,
    "token_lambda": token_lambda,
    "decoupled": decoupled,
}


# ---- Termination conditions ----


def value_changes(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Ends (B, R) after the tokens where the critic's value changes most, one token in MEAN_LENGTH."""
    values = critic_values(trajectory)
    changes = torch.zeros_like(values)
    changes[:, :-1] = (values[:, 1:] - values[:, :-1]).abs()
    return cut_at_highest(changes, trajectory.response_mask)


def shrinking(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Ends (B, R) every n tokens; the better the critic, the smaller n.

    n falls linearly from LONGEST_MACRO_ACTION to 1 while the share of the scores' variance that the critic explains in
    the middle of the responses grows from 0 to GOOD_EXPLAINED_VARIANCE. All ranks have the same n.
    """
    mask = trajectory.response_mask
    values_in_middle = critic_values(trajectory).gather(1, middle_columns(mask)[:, None])[:, 0]
    explained = explained_variance(values_in_middle, trajectory.scores, mask.any(1))
    progress = min(max(explained / GOOD_EXPLAINED_VARIANCE, 0.0), 1.0)
    return fixed(mask, round(LONGEST_MACRO_ACTION - progress * (LONGEST_MACRO_ACTION - 1)))


def middle_columns(mask: Tensor) -> Tensor:
    """Column of the middle True entry of each row, the later one of two. (B, R) bool → (B,) int64.

    Example: 1 1 0 1 1 gives 3; a row without True gives 0.
    """
    half = mask.sum(1, keepdim=True) // 2
    is_from_middle_on = mask.cumsum(1) > half
    return is_from_middle_on.int().argmax(1)


def high_entropy(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Ends (B, R) before the tokens of which the reference model was least sure, one token in MEAN_LENGTH.

    Raises:
        UserError: the variable REFERENCE_MODEL does not name the model's folder.
    """
    mask = trajectory.response_mask
    rollout = trajectory.rollout
    folder = os.environ.get(REFERENCE_MODEL)
    if folder is None:
        raise UserError(f"high_entropy reads a model from the folder in {REFERENCE_MODEL}: set this variable.")
    reference = _reference(folder, tokenizer).to(rollout.input_ids.device)
    with torch.no_grad():
        _, entropy = reference(rollout.input_ids, rollout.attention_mask, mask.shape[1])
    entropy_of_next = torch.zeros_like(entropy)
    entropy_of_next[:, :-1] = entropy[:, 1:]
    return cut_at_highest(entropy_of_next, mask)


@cache
def _reference(folder: str, tokenizer: PreTrainedTokenizerBase) -> PolicyModel:
    return PolicyModel(load_causal_lm(folder, REFERENCE_MODEL, torch.float32, tokenizer)).eval()


def cut_at_highest(priorities: Tensor, mask: Tensor) -> Tensor:
    """Ends of macro actions after the tokens of highest priority, one token in MEAN_LENGTH of each row.

    The last token of each run of the mask is always one of the ends, so that fewer are chosen by priority.

    Args:
        priorities: shape ``(B, R)``; of equal ones the leftmost counts as the highest.
        mask: shape ``(B, R)``, bool, the response.

    Returns:
        Shape ``(B, R)``, bool.
    """
    run_ends = last_true(mask)
    chosen_count = (mask.sum(1) / MEAN_LENGTH).ceil() - run_ends.sum(1)
    candidates = torch.where(mask & ~run_ends, priorities, -math.inf)
    order = candidates.argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1)
    return (rank < chosen_count[:, None]) | run_ends
