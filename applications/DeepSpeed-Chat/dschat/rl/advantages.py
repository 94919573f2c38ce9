# SPDX-License-Identifier: Apache-2.0
"""Advantages: generalised advantage estimation over macro steps (Schulman et al. 2016); leave-one-out baselines."""

import torch
from torch import Tensor


def gae(values: Tensor, rewards: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """δ_τ = R_τ + γ V_{τ+1} − V_τ, Â_τ = δ_τ + γλ Â_{τ+1}, Ret_τ = Â_τ + V_τ; the value after the last step is 0.

    Example: values .5 .2, rewards 0 1, γ = 1, λ = .5 → δ = −.3, .8; advantages .1, .8; returns .6, 1.

    Args:
        values, rewards: (B, M).
        mask: (B, M) bool, a prefix of each row.
        gamma, lam: count macro steps, not tokens.

    Returns:
        advantages, returns: (B, M) each, 0 off the mask.
    """
    zeros = torch.zeros_like(values)
    values, rewards = torch.where(mask, values, zeros), torch.where(mask, rewards, zeros)
    following = torch.cat([values[:, 1:], zeros[:, :1]], dim=1)
    deltas = rewards + gamma * following - values
    advantages = torch.empty_like(values)
    running = values.new_zeros(values.shape[0])
    for step in reversed(range(values.shape[1])):
        running = deltas[:, step] + gamma * lam * running
        advantages[:, step] = running
    return advantages, advantages + values


def rloo(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """Each score minus the mean of the other scores of its prompt (Ahmadian et al. 2024, "Back to Basics").

    Example: 1, 2, 6 → 1 − 4, 2 − 3.5, 6 − 1.5.

    Args:
        scores: (P, K), of K responses to each of P prompts.
        counted: (P, K) bool; False leaves a score out, as if that response had not been drawn. All count when None.

    Returns:
        advantages (P, K): 0 where a score is left out or no other of its prompt counts.
    """
    counted = torch.ones_like(scores, dtype=torch.bool) if counted is None else counted
    scores = torch.where(counted, scores, 0.0)
    others = counted.sum(1, keepdim=True) - 1
    baseline = (scores.sum(1, keepdim=True) - scores) / others.clamp(min=1)
    return torch.where(counted & (others > 0), scores - baseline, 0.0)
