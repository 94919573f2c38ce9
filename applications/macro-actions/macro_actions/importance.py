# SPDX-License-Identifier: Apache-2.0
"""Tokens that were sampled by a policy slightly different from the one that is trained: truncated or masked ratios."""

import torch
from torch import Tensor

from macro_actions.losses import Count, Stats, token_count, token_weights


def importance_weights(logprobs: Tensor, drawn_logprobs: Tensor, clip: float) -> Tensor:
    """min(π_old / π_sampler, clip) of every token.

    An engine that computes the actor's log-probabilities with other kernels or in lower precision samples from
    π_sampler, not from π_old. Under π_sampler, the weighted advantages have the mean that unweighted advantages have
    under π_old, except for the truncation, which bounds their variance.

    Args:
        logprobs: shape ``(B, R)``, log π_old, computed by the trainer.
        drawn_logprobs: shape ``(B, R)``, log π_sampler, computed by the engine that sampled the tokens.
        clip: largest weight.

    Returns:
        Shape ``(B, R)``, without gradient.
    """
    return (logprobs - drawn_logprobs).detach().exp().clamp(max=clip)


def masked_policy_loss(
    new_logprobs: Tensor,
    drawn_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    low: float,
    high: float,
    count: Count = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Policy loss without clipping, of the tokens whose ratio stays in a range (DIS of SAO).

        −Σ w_j 1[low ≤ ρ_j ≤ high] ρ_j Â_j / count        with ρ = π / π_sampler

    There is no old policy between the one that samples and the one that is trained.

    Args:
        new_logprobs: shape ``(B, R)``, differentiable, log π. Log-probabilities of macro actions or responses, on
            each of their tokens, make masks of macro actions or responses.
        drawn_logprobs: shape ``(B, R)``, log π_sampler of the same.
        advantages: shape ``(B, R)``.
        response_mask: shape ``(B, R)``, bool.
        low: smallest ratio that counts.
        high: largest one.
        count: denominator, see `losses.loss_count`; the number of response tokens in these rows with ``None``. Masked
            tokens count in it.
        weights: shape ``(B, R)``, weights w of the tokens; 1 with ``None``.

    Returns:
        The loss, and the statistics approxkl (½(log ρ)²), clipfrac (share of tokens that are masked) and ratio (of
        the others; masked ones count as 0).
    """
    count = token_count(response_mask, count)
    weights = token_weights(response_mask, weights)
    log_ratio = torch.where(response_mask, new_logprobs - drawn_logprobs, 0.0)
    advantages = torch.where(response_mask, advantages, 0.0)

    with torch.no_grad():
        ratio = log_ratio.exp()
        is_inside = (ratio >= low) & (ratio <= high)
    kept_weights = torch.where(is_inside, weights, 0.0)
    kept_ratio = torch.where(is_inside, log_ratio, 0.0).exp()  # finite, as its gradient
    loss = -(kept_weights * kept_ratio * advantages).sum() / count
    with torch.no_grad():
        stats = {
            "approxkl": (weights * log_ratio.square()).sum() / 2 / count,
            "clipfrac": (weights * ~is_inside).sum() / count,
            "ratio": (kept_weights * kept_ratio).sum() / count,
        }
    return loss, stats
