# SPDX-License-Identifier: Apache-2.0
"""Losses of sampled responses, by policy gradient; those of given responses are in `supervised_losses`.

Each is a sum over response tokens divided by a count that the caller passes. The count is that of the whole optimiser
update, over all micro-batches and ranks, so the gradient does not depend on how rows are split. Statistics are divided
by the same count: their sum over micro-batches and ranks is the update's mean. `policy_loss` and `value_loss` return
``(loss, stats)``, 0-d tensors, and `kl_loss` a term to be added. `loss_weights` and `loss_count` choose what the mean
is over: tokens, macro actions or responses. Nothing outside of the response mask is read, not even NaN.
"""

import torch
from torch import Tensor

from macro_actions.segments import pool_rewards, to_tokens
from macro_actions.types import MacroActions

Stats = dict[str, Tensor]
Count = Tensor | float | None  # denominator of a loss; None: the number of response tokens in these rows

LARGEST_LOG_RATIO = 20.0  # far outside of every clip; the ratio of a long macro action may be infinite beyond
LOSS_MEANS = ("token", "macro", "response", "length")


def policy_loss(
    new_logprobs: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float,
    count: Count = None,
    weights: Tensor | None = None,
    cliprange_high: float | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped objective: Σ w_j max(−Â_j ρ_j, −Â_j clip(ρ_j, 1 − cliprange, 1 + cliprange_high)) / count.

    Args:
        new_logprobs: shape ``(B, R)``, differentiable; ρ = exp(new_logprobs − logprobs).
        logprobs: shape ``(B, R)``, of the policy that sampled.
        advantages: shape ``(B, R)``.
        response_mask: shape ``(B, R)``, bool.
        cliprange: ε of the clipping.
        count: denominator, see `loss_count`; the number of response tokens in these rows with ``None``.
        weights: shape ``(B, R)``, weights w of the tokens, see `loss_weights`; 1 with ``None``.
        cliprange_high: ε above 1, larger in DAPO (Yu et al. 2025); ``cliprange`` with ``None``.

    Returns:
        The loss, and the statistics approxkl (½(log ρ)²), clipfrac (share of tokens whose clipped branch is taken) and
        ratio.
    """
    if cliprange_high is None:
        cliprange_high = cliprange
    count = token_count(response_mask, count)
    weights = token_weights(response_mask, weights)
    log_ratio = torch.where(response_mask, new_logprobs - logprobs, 0.0)
    advantages = torch.where(response_mask, advantages, 0.0)

    ratio = log_ratio.clip(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()  # finite, as its gradient
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange_high)
    loss = (weights * torch.maximum(unclipped, clipped)).sum() / count
    with torch.no_grad():
        stats = {
            "approxkl": (weights * log_ratio.square()).sum() / 2 / count,
            "clipfrac": (weights * (clipped > unclipped)).sum() / count,
            "ratio": (weights * ratio).sum() / count,
        }
    return loss, stats


def kl_loss(kl: Tensor, response_mask: Tensor, count: Count = None, weights: Tensor | None = None) -> Tensor:
    """KL to the reference as a term of the loss (GRPO): Σ w_j kl_j / count.

    Args:
        kl: shape ``(B, R)``, differentiable estimates for the current policy.
        response_mask: shape ``(B, R)``, bool.
        count: denominator, see `loss_count`; the number of response tokens in these rows with ``None``.
        weights: shape ``(B, R)``, weights w of the tokens, see `loss_weights`; 1 with ``None``.

    Returns:
        The term, 0-d.
    """
    count = token_count(response_mask, count)
    kl = torch.where(response_mask, kl, 0.0)
    return (token_weights(response_mask, weights) * kl).sum() / count


def token_count(response_mask: Tensor, count: Count) -> Tensor | float:
    """The denominator of a loss: the given one, or the number of response tokens, at least 1, with ``None``."""
    return response_mask.sum().clamp(min=1) if count is None else count


def token_weights(response_mask: Tensor, weights: Tensor | None) -> Tensor:
    """Weights (B, R) of tokens in a loss: the given ones, or 1 with ``None``; 0 outside of the response mask."""
    if weights is None:
        return response_mask.float()
    return torch.where(response_mask, weights, 0.0)


def loss_weights(mean: str, macro: MacroActions, counted: Tensor) -> Tensor | None:
    """Weights of tokens in a loss that is a mean.

        token      mean over the tokens of all responses (DAPO)
        macro      mean over macro actions of the means over their tokens
        response   mean over responses of the means over their tokens (GRPO)
        length     sum over tokens, divided by a constant length per response (Dr. GRPO)

    Example: two responses of 2 and 1 tokens, one macro action each: ``token`` and ``length`` weigh 1 1, 1; ``macro``
    and ``response`` ½ ½, 1.

    Args:
        mean: one of the four names.
        macro: macro actions of the rows.
        counted: shape ``(B, R)``, bool, tokens that the loss is about.

    Returns:
        Shape ``(B, R)``, 0 where not counted; ``None`` where all weights are 1.

    Raises:
        ValueError: the name is unknown.
    """
    _check_mean(mean)
    tokens = counted.float()
    if mean == "macro":
        sizes = to_tokens(pool_rewards(tokens, macro), macro)
    elif mean == "response":
        sizes = tokens.sum(1, keepdim=True)
    else:
        return None
    return tokens / sizes.clamp(min=1)


def loss_count(mean: str, macro: MacroActions, counted: Tensor, max_length: int) -> Tensor:
    """These rows' part of a loss's denominator, which is the sum of such parts over micro-batches and ranks.

    Args:
        mean: see :func:`loss_weights`.
        macro: macro actions of the rows.
        counted: shape ``(B, R)``, bool, tokens that the loss is about.
        max_length: constant length of a response in tokens, for ``length``.

    Returns:
        0-d: the number of tokens, macro actions or responses; for ``length`` responses times ``max_length``.

    Raises:
        ValueError: the name is unknown.
    """
    _check_mean(mean)
    if mean == "token":
        return counted.sum().float()
    if mean == "macro":
        tokens_by_macro = pool_rewards(counted.float(), macro)
        return (tokens_by_macro > 0).sum().float()
    responses = counted.any(1).sum().float()
    return max_length * responses if mean == "length" else responses


def _check_mean(mean: str) -> None:
    if mean not in LOSS_MEANS:
        raise ValueError(f"mean must be one of {', '.join(LOSS_MEANS)}, not {mean!r}")


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    num_tokens: Count = None,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped value loss.

        ½ Σ w max((V_j − Ret_j)², (clip(V_j, V_old,j ± cliprange_value) − Ret_j)²) / num_tokens

    Args:
        new_values: shape ``(B, R)``, differentiable.
        values: shape ``(B, R)``, V_old, the critic's values at rollout time.
        returns: shape ``(B, R)``.
        response_mask: shape ``(B, R)``, bool.
        cliprange_value: largest step from the old value that lowers the loss.
        num_tokens: denominator; the number of response tokens in these rows with ``None``.
        row_weights: shape ``(B,)``, weight w of each row's tokens; 1 with ``None``.

    Returns:
        The loss, and the statistic clipfrac (share of tokens whose clipped branch is taken).
    """
    num_tokens = token_count(response_mask, num_tokens)
    new_values = torch.where(response_mask, new_values, 0.0)
    values = torch.where(response_mask, values, 0.0)
    returns = torch.where(response_mask, returns, 0.0)

    clipped_values = new_values.clamp(values - cliprange_value, values + cliprange_value)
    unclipped = (new_values - returns).square()
    clipped = (clipped_values - returns).square()
    losses = torch.maximum(unclipped, clipped)
    if row_weights is not None:
        losses = row_weights[:, None] * losses
    loss = losses.sum() / 2 / num_tokens
    with torch.no_grad():
        stats = {"clipfrac": (clipped > unclipped).sum() / num_tokens}
    return loss, stats
