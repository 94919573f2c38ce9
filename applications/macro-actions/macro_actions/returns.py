# SPDX-License-Identifier: Apache-2.0
"""Advantages and returns over macro actions by generalised advantage estimation, as functions of plain tensors.

Shapes: B rows, R response positions, M macro actions.
"""

import torch
from torch import Tensor

from macro_actions.segments import pool_rewards, pool_values, segment, to_tokens
from macro_actions.types import MacroActions


def gae(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over macro actions (Schulman et al. 2016).

        δ_τ = R_τ + γ V_{τ+1} − V_τ        Â_τ = δ_τ + γλ Â_{τ+1}        Ret_τ = Â_τ + V_τ

    The value after the last macro action is 0.

    Example: values .5 .2, rewards 0 1, γ = 1, λ = .5: δ = −.3 .8, advantages .1 .8, returns .6 1.

    Args:
        values: shape ``(B, M)``.
        rewards: shape ``(B, M)``.
        mask: shape ``(B, M)``, bools or numbers, True on a prefix of each row.
        gamma: discount per macro action, not per token.
        lam: λ per macro action: a number, or one for each row, shape ``(B,)``.

    Returns:
        advantages and returns, shape ``(B, M)`` each, 0 off the mask.
    """
    mask = mask.bool()
    dtype = torch.promote_types(values.dtype, rewards.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    values = torch.where(mask, values.to(dtype), 0.0)
    rewards = torch.where(mask, rewards.to(dtype), 0.0)

    next_values = torch.zeros_like(values)
    next_values[:, :-1] = values[:, 1:]
    deltas = rewards + gamma * next_values - values

    advantages = torch.empty_like(values)
    running = values.new_zeros(values.shape[0])
    for step in reversed(range(values.shape[1])):
        running = deltas[:, step] + gamma * lam * running
        advantages[:, step] = running
    return advantages, advantages + values


@torch.no_grad()
def macro_gae(
    values: Tensor,
    rewards: Tensor,
    ends: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    value_function: str = "equal",
    macro_reward: str = "sum",
) -> tuple[Tensor, Tensor]:
    """GAE over macro actions from and to tokens: pool values and rewards, :func:`gae`, broadcast to the tokens.

    Macro actions of one token give token-level GAE. Nothing is whitened. Consecutive macro actions of a row may be
    separated by a hole of its mask (another turn, a tool's answer); a hole is no step.

    Example: values .5 .1 .2 .4, rewards 0 0 0 1, ends 0 1 0 1, γ = 1, λ = .5 and value function ``first`` have macro
    values .5 .2 and macro rewards 0 1; the advantages are .1 .1 .8 .8 and the returns .6 .6 1 1.

    Args:
        values: shape ``(B, R)``, V of the state before each token.
        rewards: shape ``(B, R)``, token rewards.
        ends: shape ``(B, R)``, bool, from a termination condition.
        response_mask: shape ``(B, R)``, bools or numbers, 1 on response tokens; padded on either side, with or without
            holes.
        gamma: discount per macro action, not per token.
        lam: λ per macro action: a number, or one for each row, shape ``(B,)``.
        value_function: σ, see :func:`macro_actions.segments.value_weights`.
        macro_reward: ``sum`` or ``mean`` of the rewards of a macro action's tokens.

    Returns:
        advantages and returns, shape ``(B, R)`` each, 0 off the response, without gradient. They are float64 if values
        or rewards are, otherwise float32.

    Raises:
        ValueError: shapes differ, or value_function or macro_reward is unknown.
    """
    if not values.shape == rewards.shape == ends.shape == response_mask.shape:
        shapes = [tuple(x.shape) for x in (values, rewards, ends, response_mask)]
        raise ValueError(f"values, rewards, ends and response_mask must be (B, R) each, not {shapes}")
    macro = segment(ends, response_mask)
    macro_values = pool_values(values, macro, value_function)
    macro_rewards = pool_rewards(rewards, macro, macro_reward, value_function)
    advantages, returns = gae(macro_values, macro_rewards, macro.mask, gamma, lam)
    return to_tokens(advantages, macro), to_tokens(returns, macro)


def adaptive_lam(steps: Tensor, alpha: float) -> Tensor:
    """VAPO's λ for each response (Yue et al. 2025): max(0, 1 − 1 / (α l)) for l macro actions.

    Example: with α = .05, λ is 0 for 20 macro actions, .8 for 100, .9 for 200.

    Args:
        steps: shape ``(B,)``, number of macro actions.
        alpha: α.

    Returns:
        Shape ``(B,)``, float32.
    """
    length = steps.clamp(min=1).float()
    return (1 - 1 / (alpha * length)).clamp(min=0)


def discounted_sums(macro_rewards: Tensor, macro: MacroActions, gamma: float) -> Tensor:
    """Σ_{τ' ≥ τ} γ^(τ' − τ) R_τ' for every macro action. (B, M) → (B, M)."""
    sums, _ = gae(torch.zeros_like(macro_rewards), macro_rewards, macro.mask, gamma, 1.0)
    return sums
