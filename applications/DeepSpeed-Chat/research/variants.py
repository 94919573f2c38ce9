# SPDX-License-Identifier: Apache-2.0
"""Estimators with one part of macro actions at a time, composed from the package's pure functions.

They have the signature of those in `macro_actions.estimators`; token-level PPO is GAE with macro actions of one token.
They compute with macro actions of their own. The batch that they return has the run's macro actions again, which
--policy_ratio uses.

Shapes: B rows, R response positions. In the formulas token j belongs to macro action τ(j).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from macro_actions.estimators import Estimator, EstimatorSettings, gae_batch
from macro_actions.returns import macro_gae
from macro_actions.segments import on_last_tokens, pool_rewards, pool_values, segment, to_tokens
from macro_actions.types import MacroActions, PPOBatch, Trajectory


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


VARIANTS: dict[str, Estimator] = {"value_only": value_only, "reward_only": reward_only, "ratio_only": ratio_only}


def middle_columns(mask: Tensor) -> Tensor:
    """Column of the middle True entry of each row, the later one of two. (B, R) bool → (B,) int64.

    Example: 1 1 0 1 1 gives 3; a row without True gives 0.
    """
    half = mask.sum(1, keepdim=True) // 2
    is_from_middle_on = mask.cumsum(1) > half
    return is_from_middle_on.int().argmax(1)
