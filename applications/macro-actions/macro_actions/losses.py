# SPDX-License-Identifier: Apache-2.0
"""Losses: each is a sum over response tokens (or pairs) divided by a count given from outside.

The count is that of the whole optimiser update, over all micro-batches and ranks, so that the gradient does not depend
on how rows are split. Statistics are divided by the same count: adding them up over the parts gives the update's mean.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from macro_actions.segments import pool_rewards, to_tokens
from macro_actions.types import MacroActions

Stats = dict[str, Tensor]

LOSS_MEANS = ("token", "macro", "response", "length")


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float,
    num_tokens: Tensor | float | None = None,
    weights: Tensor | None = None,
    cliprange_high: float | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped objective: Σ w_j max(−Â_j ρ_j, −Â_j clip(ρ_j, 1 − cliprange, 1 + cliprange_high)) / num_tokens.

    Args:
        new_logprobs: (B, R), differentiable; ρ = exp(new_logprobs − logprobs).
        logprobs: (B, R), of the policy that sampled.
        advantages: (B, R).
        response_mask: (B, R) bool.
        cliprange: ε of the clipping.
        num_tokens: the denominator; the response tokens given here when None.
        weights: (B, R) of the tokens; 1 when None.
        cliprange_high: ε above 1 (DAPO's is larger, Yu et al. 2025); ``cliprange`` when None.

    Returns:
        The loss (0-d), and approxkl (½(log ρ)²), clipfrac (share of tokens whose clipped branch is taken) and ratio.
    """
    num_tokens = response_mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    log_ratio = torch.where(response_mask, new_logprobs - logprobs, 0.0)
    advantages = torch.where(response_mask, advantages, 0.0)
    weight = response_mask.to(log_ratio.dtype) if weights is None else torch.where(response_mask, weights, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    high = cliprange if cliprange_high is None else cliprange_high
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + high)
    loss = (weight * torch.maximum(unclipped, clipped)).sum() / num_tokens
    with torch.no_grad():
        stats = {
            "approxkl": (weight * log_ratio.square()).sum() / 2 / num_tokens,
            "clipfrac": (weight * (clipped > unclipped)).sum() / num_tokens,
            "ratio": (weight * ratio).sum() / num_tokens,
        }
    return loss, stats


def kl_loss(
    kl: Tensor, response_mask: Tensor, num_tokens: Tensor | float | None = None, weights: Tensor | None = None
) -> Tensor:
    """Σ w_j kl_j / num_tokens, 0-d: the KL estimates (B, R) of the policy as it is, as a term of the loss (GRPO)."""
    num_tokens = response_mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    kept = torch.where(response_mask, kl, 0.0)
    return (kept if weights is None else weights * kept).sum() / num_tokens


def loss_weights(mean: str, macro: MacroActions, counted: Tensor) -> Tensor | None:
    """Weights of the tokens for the mean that a loss is: (B, R), 0 where not counted; None where all are 1.

    ``token`` over the tokens of all responses (DAPO) · ``macro`` over macro actions, in each over its tokens ·
    ``response`` over responses, in each over its tokens (GRPO) · ``length`` the sum over tokens by a constant length
    (Dr. GRPO), which is in the denominator of :func:`loss_count`.

    Example, responses of 2 and 1 tokens in one macro action each: token 1 1, 1; macro and response ½ ½, 1.

    Args:
        mean: one of the four.
        macro: of the rows.
        counted: (B, R) bool, tokens that the loss is of.

    Raises:
        ValueError: unknown mean.
    """
    if mean not in LOSS_MEANS:
        raise ValueError(f"mean must be one of {', '.join(LOSS_MEANS)}, not {mean!r}")
    tokens = counted.float()
    if mean == "macro":
        sizes = to_tokens(pool_rewards(tokens, macro), macro)
    elif mean == "response":
        sizes = tokens.sum(1, keepdim=True)
    else:
        return None
    return tokens / sizes.clamp(min=1)


def loss_count(mean: str, macro: MacroActions, counted: Tensor, longest: int) -> Tensor:
    """What the sum over these rows is divided by, 0-d, to be added up over ranks; see :func:`loss_weights`.

    Args:
        mean: as there.
        macro: of the rows.
        counted: (B, R) bool, tokens that the loss is of.
        longest: ``length``: the constant length of a response, in tokens.

    Raises:
        ValueError: unknown mean.
    """
    if mean not in LOSS_MEANS:
        raise ValueError(f"mean must be one of {', '.join(LOSS_MEANS)}, not {mean!r}")
    if mean == "token":
        return counted.sum().float()
    if mean == "macro":
        return (pool_rewards(counted.float(), macro) > 0).sum().float()
    return counted.any(1).sum().float() * (longest if mean == "length" else 1)


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """½ Σ max((V_j − Ret_j)², (clip(V_j, V_old,j ± cliprange_value) − Ret_j)²) / num_tokens.

    Args:
        new_values: (B, R), differentiable.
        values: (B, R), of the critic at rollout time.
        returns: (B, R).
        response_mask: (B, R) bool.
        cliprange_value: largest step from the old value that is rewarded.
        num_tokens: the denominator; the response tokens given here when None.

    Returns:
        The loss (0-d), and clipfrac, the share of tokens whose clipped branch is taken.
    """
    num_tokens = response_mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    new_values = torch.where(response_mask, new_values, 0.0)
    values, returns = torch.where(response_mask, values, 0.0), torch.where(response_mask, returns, 0.0)
    clipped_values = torch.maximum(torch.minimum(new_values, values + cliprange_value), values - cliprange_value)
    unclipped, clipped = (new_values - returns).square(), (clipped_values - returns).square()
    loss = torch.maximum(unclipped, clipped).sum() / 2 / num_tokens
    with torch.no_grad():
        stats = {"clipfrac": (clipped > unclipped).sum() / num_tokens}
    return loss, stats


def sft_loss(
    logprobs: Tensor, response_mask: Tensor, num_tokens: Tensor | float | None = None
) -> tuple[Tensor, Stats]:
    """Cross-entropy on the response: −Σ logprobs / num_tokens.

    Args:
        logprobs: (B, R), differentiable.
        response_mask: (B, R) bool.
        num_tokens: the denominator; the response tokens given here when None.

    Returns:
        The loss (0-d, nats per token), and no statistics.
    """
    num_tokens = response_mask.sum().clamp(min=1) if num_tokens is None else num_tokens
    return -torch.where(response_mask, logprobs, 0.0).sum() / num_tokens, {}


def dpo_loss(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    num_pairs: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """Direct preference optimisation (Rafailov et al. 2023) with m = β (chosen − rejected):

    Σ −(1 − ε) log σ(m) − ε log σ(−m), divided by num_pairs. With ε > 0 it is conservative DPO (Mitchell 2023): a label
    is wrong with probability ε.

    Args:
        chosen_log_ratios, rejected_log_ratios: (N,), differentiable: Σ log π − log π_ref over a response's tokens.
        beta: β, how close the policy stays to the reference.
        label_smoothing: ε.
        num_pairs: the denominator; N when None.

    Returns:
        The loss (0-d), and accuracy (share of pairs with m > 0), margin (mean m), and chosen and rejected (mean
        log-ratios).
    """
    num_pairs = max(chosen_log_ratios.shape[0], 1) if num_pairs is None else num_pairs
    margin = beta * (chosen_log_ratios - rejected_log_ratios)
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    with torch.no_grad():
        stats = {
            "accuracy": (margin > 0).sum() / num_pairs,
            "margin": margin.sum() / num_pairs,
            "chosen": chosen_log_ratios.sum() / num_pairs,
            "rejected": rejected_log_ratios.sum() / num_pairs,
        }
    return losses.sum() / num_pairs, stats


def regression_loss(
    log_ratios: Tensor,
    other_log_ratios: Tensor,
    reward_differences: Tensor,
    eta: float,
    num_pairs: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """REFUEL (Gao et al. 2024): Σ (D − η ΔR)² / num_pairs with D = log_ratios − other_log_ratios.

    With one turn it is REBEL. Swapping the two responses of a pair, and so the sign of ΔR, changes nothing.

    Args:
        log_ratios, other_log_ratios: (N,), differentiable: Σ log π − log π_t over the tokens of the two responses to a
            state, where π_t is the policy that drew them.
        reward_differences: (N,), ΔR: the rewards-to-go of the first minus those of the other.
        eta: η; a large one is a large step.
        num_pairs: the denominator; N when None.

    Returns:
        The loss (0-d), and kl (mean log-ratio of all responses, an estimate of −KL(π_t‖π)), kl_better and kl_worse
        (those with the higher and the lower reward; of equal ones the second is the better), agreement (share of pairs
        in which D has the sign of ΔR), ratio and ratio_squared (means of exp(log-ratio) and its square, from
        log-ratios of 20 at most).
    """
    num_pairs = max(log_ratios.shape[0], 1) if num_pairs is None else num_pairs
    differences = log_ratios - other_log_ratios
    loss = (differences - eta * reward_differences).square().sum() / num_pairs
    with torch.no_grad():
        first_better = reward_differences > 0
        ratios = torch.stack([log_ratios, other_log_ratios]).clamp(max=20).exp()
        stats = {
            "kl": (log_ratios + other_log_ratios).sum() / 2 / num_pairs,
            "kl_better": torch.where(first_better, log_ratios, other_log_ratios).sum() / num_pairs,
            "kl_worse": torch.where(first_better, other_log_ratios, log_ratios).sum() / num_pairs,
            "agreement": (differences * reward_differences > 0).sum() / num_pairs,
            "ratio": ratios.sum() / 2 / num_pairs,
            "ratio_squared": ratios.square().sum() / 2 / num_pairs,
        }
    return loss, stats
