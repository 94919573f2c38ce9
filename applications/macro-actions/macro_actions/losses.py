# SPDX-License-Identifier: Apache-2.0
"""Losses: each is a sum over response tokens (or pairs) divided by a count that the caller passes.

The count is that of the whole optimiser update, over all micro-batches and ranks, so the gradient does not depend on
how rows are split. Statistics are divided by the same count: their sum over micro-batches and ranks is the update's
mean. Every loss returns ``(loss, stats)``, 0-d tensors.
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
        new_logprobs: shape ``(B, R)``, differentiable; ρ = exp(new_logprobs − logprobs).
        logprobs: shape ``(B, R)``, of the policy that sampled.
        advantages: shape ``(B, R)``.
        response_mask: shape ``(B, R)``, bool.
        cliprange: ε of the clipping.
        num_tokens: denominator; the number of response tokens in these rows with ``None``.
        weights: shape ``(B, R)``, weights w of the tokens; 1 with ``None``.
        cliprange_high: ε above 1, larger in DAPO (Yu et al. 2025); ``cliprange`` with ``None``.

    Returns:
        The loss, and the statistics approxkl (½(log ρ)²), clipfrac (share of tokens whose clipped branch is taken) and
        ratio.
    """
    if num_tokens is None:
        num_tokens = response_mask.sum().clamp(min=1)
    log_ratio = torch.where(response_mask, new_logprobs - logprobs, 0.0)
    advantages = torch.where(response_mask, advantages, 0.0)
    if weights is None:
        weight = response_mask.to(log_ratio.dtype)
    else:
        weight = torch.where(response_mask, weights, 0.0)
    if cliprange_high is None:
        cliprange_high = cliprange

    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange_high)
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
    """KL to the reference as a term of the loss (GRPO): Σ w_j kl_j / num_tokens.

    Args:
        kl: shape ``(B, R)``, differentiable estimates for the current policy.
        response_mask: shape ``(B, R)``, bool.
        num_tokens: denominator; the number of response tokens in these rows with ``None``.
        weights: shape ``(B, R)``; 1 with ``None``.

    Returns:
        The term, 0-d.
    """
    if num_tokens is None:
        num_tokens = response_mask.sum().clamp(min=1)
    kl = torch.where(response_mask, kl, 0.0)
    if weights is not None:
        kl = weights * kl
    return kl.sum() / num_tokens


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
    """These rows' part of a loss's denominator, which is the sum of such parts over micro-batches and ranks.

    Args:
        mean: see :func:`loss_weights`.
        macro: macro actions of the rows.
        counted: shape ``(B, R)``, bool, tokens that the loss is about.
        longest: constant length of a response in tokens, for ``length``.

    Returns:
        0-d: the number of tokens, macro actions or responses; for ``length`` responses times ``longest``.

    Raises:
        ValueError: the name is unknown.
    """
    if mean not in LOSS_MEANS:
        raise ValueError(f"mean must be one of {', '.join(LOSS_MEANS)}, not {mean!r}")
    if mean == "token":
        return counted.sum().float()
    if mean == "macro":
        tokens_by_macro = pool_rewards(counted.float(), macro)
        return (tokens_by_macro > 0).sum().float()
    responses = counted.any(1).sum().float()
    return responses * (longest if mean == "length" else 1)


def value_loss(
    new_values: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """PPO's clipped value loss: ½ Σ max((V_j − Ret_j)², (clip(V_j, V_old,j ± cliprange_value) − Ret_j)²) / num_tokens.

    Args:
        new_values: shape ``(B, R)``, differentiable.
        values: shape ``(B, R)``, V_old, the critic's values at rollout time.
        returns: shape ``(B, R)``.
        response_mask: shape ``(B, R)``, bool.
        cliprange_value: largest step from the old value that lowers the loss.
        num_tokens: denominator; the number of response tokens in these rows with ``None``.

    Returns:
        The loss, and the statistic clipfrac (share of tokens whose clipped branch is taken).
    """
    if num_tokens is None:
        num_tokens = response_mask.sum().clamp(min=1)
    new_values = torch.where(response_mask, new_values, 0.0)
    values = torch.where(response_mask, values, 0.0)
    returns = torch.where(response_mask, returns, 0.0)

    clipped_values = torch.minimum(new_values, values + cliprange_value)
    clipped_values = torch.maximum(clipped_values, values - cliprange_value)
    unclipped = (new_values - returns).square()
    clipped = (clipped_values - returns).square()
    loss = torch.maximum(unclipped, clipped).sum() / 2 / num_tokens
    with torch.no_grad():
        stats = {"clipfrac": (clipped > unclipped).sum() / num_tokens}
    return loss, stats


def sft_loss(
    logprobs: Tensor, response_mask: Tensor, num_tokens: Tensor | float | None = None
) -> tuple[Tensor, Stats]:
    """Cross-entropy on the response: −Σ logprobs / num_tokens.

    Args:
        logprobs: shape ``(B, R)``, differentiable.
        response_mask: shape ``(B, R)``, bool.
        num_tokens: denominator; the number of response tokens in these rows with ``None``.

    Returns:
        The loss in nats per token, and no statistics.
    """
    if num_tokens is None:
        num_tokens = response_mask.sum().clamp(min=1)
    total = torch.where(response_mask, logprobs, 0.0).sum()
    return -total / num_tokens, {}


def dpo_loss(
    chosen_log_ratios: Tensor,
    rejected_log_ratios: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    num_pairs: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """Direct preference optimisation (Rafailov et al. 2023).

        Σ [−(1 − ε) log σ(m) − ε log σ(−m)] / num_pairs        with m = β (chosen − rejected)

    With ε > 0 it is conservative DPO (Mitchell 2023), which assumes that a label is wrong with probability ε.

    Args:
        chosen_log_ratios: shape ``(N,)``, differentiable: Σ (log π − log π_ref) over the tokens of a response.
        rejected_log_ratios: shape ``(N,)``, differentiable, of the rejected responses.
        beta: β; the policy stays closer to the reference with a larger one.
        label_smoothing: ε.
        num_pairs: denominator; N with ``None``.

    Returns:
        The loss, and the statistics accuracy (share of pairs with m > 0), margin (mean m), chosen and rejected (the
        means of whose difference m is: β times the log-ratios, DPO's implicit rewards).
    """
    if num_pairs is None:
        num_pairs = max(chosen_log_ratios.shape[0], 1)
    margin = beta * (chosen_log_ratios - rejected_log_ratios)
    loss_if_right = -F.logsigmoid(margin)
    loss_if_wrong = -F.logsigmoid(-margin)
    losses = (1 - label_smoothing) * loss_if_right + label_smoothing * loss_if_wrong
    with torch.no_grad():
        stats = {
            "accuracy": (margin > 0).sum() / num_pairs,
            "margin": margin.sum() / num_pairs,
            "chosen": beta * chosen_log_ratios.sum() / num_pairs,
            "rejected": beta * rejected_log_ratios.sum() / num_pairs,
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

    For dialogues of one turn it is REBEL. Exchanging the two responses of a pair, and so the sign of ΔR, changes
    nothing.

    Args:
        log_ratios: shape ``(N,)``, differentiable: Σ (log π − log π_t) over the tokens of the first response to a
            state, where π_t is the policy that sampled it.
        other_log_ratios: shape ``(N,)``, differentiable, of the second response to that state.
        reward_differences: shape ``(N,)``, ΔR: reward-to-go of the first response minus that of the second.
        eta: η; the update is larger with a larger one.
        num_pairs: denominator; N with ``None``.

    Returns:
        The loss, and the statistics log_ratio (mean log-ratio of all responses, an estimate of −KL(π_t‖π)),
        log_ratio_better and log_ratio_worse (mean log-ratio of the responses with the higher and the lower reward;
        with equal rewards the second counts as the better one), agreement (share of pairs in which D and ΔR have one
        sign), ratio and ratio_squared (means of exp(log-ratio) and its square, log-ratios clamped to 20).
    """
    if num_pairs is None:
        num_pairs = max(log_ratios.shape[0], 1)
    differences = log_ratios - other_log_ratios
    loss = (differences - eta * reward_differences).square().sum() / num_pairs
    with torch.no_grad():
        first_better = reward_differences > 0
        better = torch.where(first_better, log_ratios, other_log_ratios)
        worse = torch.where(first_better, other_log_ratios, log_ratios)
        ratios = torch.stack([log_ratios, other_log_ratios]).clamp(max=20).exp()
        stats = {
            "log_ratio": (log_ratios + other_log_ratios).sum() / 2 / num_pairs,
            "log_ratio_better": better.sum() / num_pairs,
            "log_ratio_worse": worse.sum() / num_pairs,
            "agreement": (differences * reward_differences > 0).sum() / num_pairs,
            "ratio": ratios.sum() / 2 / num_pairs,
            "ratio_squared": ratios.square().sum() / 2 / num_pairs,
        }
    return loss, stats
