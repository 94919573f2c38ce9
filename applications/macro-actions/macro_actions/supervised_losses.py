# SPDX-License-Identifier: Apache-2.0
"""Losses of given responses: a sum over tokens or pairs divided by the count of the whole update, as in `losses`."""

import torch
from torch import Tensor
from torch.nn import functional as F

Stats = dict[str, Tensor]


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
