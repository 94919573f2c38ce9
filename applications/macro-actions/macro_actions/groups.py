# SPDX-License-Identifier: Apache-2.0
"""Responses of a group, the K samples of one prompt, compared with each other; prompts do not affect each other.

``scores`` has shape (P, K). ``counted``, bool of the same shape, is False for responses that are treated as if they
had not been sampled. Where it may be left out (estimators, `critic_weights`, `prefix_values`), ``None`` counts all.
"""

import torch
from torch import Tensor

EPSILON = 1e-6  # added to a standard deviation


def rloo(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """RLOO (Ahmadian et al. 2024, "Back to Basics"): a score minus the mean of the prompt's other scores.

        Â_k = s_k − Σ_{i ≠ k} s_i / (K − 1)

    Example: scores 1, 2, 6 give 1 − 4, 2 − 3.5, 6 − 1.5.

    Args:
        scores: shape ``(P, K)``.
        counted: shape ``(P, K)``, bool, or ``None`` if all scores count.

    Returns:
        advantages, shape ``(P, K)``: 0 where a score does not count or is the prompt's only one.
    """
    counted = _all_if_none(counted, scores)
    scores = torch.where(counted, scores, 0.0)
    others = counted.sum(1, keepdim=True) - 1
    sum_of_others = scores.sum(1, keepdim=True) - scores
    baseline = sum_of_others / others.clamp(min=1)
    return torch.where(counted & (others > 0), scores - baseline, 0.0)


def dr_grpo(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """Dr. GRPO (Liu et al. 2025): a score minus the mean of the prompt's scores, (1 − 1/K) times :func:`rloo`.

        Â_k = s_k − Σ_i s_i / K

    Example: scores 1, 2, 6 give −2, −1, 3.

    Args:
        scores: shape ``(P, K)``.
        counted: shape ``(P, K)``, bool, or ``None`` if all scores count.

    Returns:
        advantages, shape ``(P, K)``: 0 where a score does not count or is the prompt's only one.
    """
    counted = _all_if_none(counted, scores)
    mean, _ = moments(scores, counted)
    return torch.where(counted, scores - mean, 0.0)


def grpo(scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """GRPO (Shao et al. 2024): :func:`dr_grpo` divided by the standard deviation of the prompt's scores plus 1e-6.

    The deviation has the denominator K − 1, as in the released implementations.

        Â_k = (s_k − mean) / (std + 1e-6)

    Example: scores 1, 2, 6 give −2/√7, −1/√7, 3/√7.

    Args:
        scores: shape ``(P, K)``.
        counted: shape ``(P, K)``, bool, or ``None`` if all scores count.

    Returns:
        advantages, shape ``(P, K)``: 0 where a score does not count, is the prompt's only one, or all are equal.
    """
    counted = _all_if_none(counted, scores)
    return dr_grpo(scores, counted) / grpo_divisor(scores, counted)


def grpo_divisor(scores: Tensor, counted: Tensor) -> Tensor:
    """Divisor of :func:`grpo`: standard deviation plus 1e-6, or infinity where all scores are equal.

    Args:
        scores: shape ``(P, K)``.
        counted: shape ``(P, K)``, bool.

    Returns:
        Shape ``(P, 1)``.
    """
    _, variance = moments(scores, counted)
    equal = are_equal(scores, counted)[:, None]
    return torch.where(equal, torch.inf, variance.sqrt() + EPSILON)


def moments(scores: Tensor, counted: Tensor, correction: int = 1) -> tuple[Tensor, Tensor]:
    """Mean and variance of each prompt's scores.

    Args:
        scores: shape ``(P, K)``.
        counted: shape ``(P, K)``, bool.
        correction: the variance has the denominator max(number of counted scores − correction, 1).

    Returns:
        Shape ``(P, 1)`` each. The variance of a single score is 0.
    """
    count = counted.sum(1, keepdim=True)
    total = torch.where(counted, scores, 0.0).sum(1, keepdim=True)
    mean = total / count.clamp(min=1)
    centred = torch.where(counted, scores - mean, 0.0)
    squares = centred.square().sum(1, keepdim=True)
    variance = squares / (count - correction).clamp(min=1)
    return mean, variance


def critic_weights(scores: Tensor, beta: float, floor: float, counted: Tensor | None = None) -> Tensor:
    """Weights of prompts in the critic's loss, smaller for prompts whose scores vary more (EasyPPO).

        w = 1 / max(v^β, floor)        v: variance of the prompt's counted scores; its denominator is their number

    The caller divides the weights by their mean over all prompts of the rollout. A prompt with one counted score has
    variance 0, as one whose scores are equal.

    Example: with β = 1 and a floor of .01, scores 0, 1 weigh 4, and scores ½, ½ weigh 100.

    Args:
        scores: shape ``(P, K)``.
        beta: β; ½ divides by the standard deviation.
        floor: above 0; bounds the weight of equal scores.
        counted: shape ``(P, K)``, bool, or ``None`` if all scores count.

    Returns:
        Shape ``(P,)``; 0 for a prompt none of whose scores count.
    """
    counted = _all_if_none(counted, scores)
    _, variance = moments(scores, counted, correction=0)
    weights = 1 / variance.squeeze(1).pow(beta).clamp(min=floor)
    return torch.where(counted.any(1), weights, 0.0)


def are_equal(scores: Tensor, counted: Tensor) -> Tensor:
    """Whether all scores of a prompt are equal, so that nothing can be learned from it (Yu et al. 2025).

    True for a prompt with one counted score, or with none.

    Args:
        scores: shape ``(P, K)``.
        counted: shape ``(P, K)``, bool.

    Returns:
        Shape ``(P,)``, bool.
    """
    lowest = torch.where(counted, scores, torch.inf).amin(1)
    highest = torch.where(counted, scores, -torch.inf).amax(1)
    return highest <= lowest


def rloo_turns(returns: Tensor, reached: Tensor) -> Tensor:
    """The return from each turn on minus a baseline made of the prompt's other responses alone.

    The baseline of turn h is the mean return from turn h of the other responses that reached turn h, or, where none
    did, the mean of the others' whole episodes. It does not depend on the response itself, so the policy gradient is
    unbiased.

    Example: returns 3 1, 2 and 7 5 of responses with 2, 1 and 2 turns. Turn 1: 3 − 4.5, 2 − 5, 7 − 2.5; turn 2:
    1 − 5 and 5 − 1. Returns 4 and 6 2 of responses with 1 and 2 turns: no other response reached the second's turn 2,
    so its advantage there is 2 − 4.

    Args:
        returns: shape ``(P, K, H)``, from each turn on.
        reached: shape ``(P, K, H)``, bool, True on a prefix of each row: its turns. A response without turns counts
            in no baseline.

    Returns:
        advantages, shape ``(P, K, H)``: 0 off ``reached``, and where no other response of the prompt has a turn.
    """
    returns = torch.where(reached, returns, 0.0)
    count = reached.sum(1, keepdim=True) - reached.long()
    total = returns.sum(1, keepdim=True) - returns
    # Whole episodes of the others, for turns that no other response reached.
    episode_count = count[..., :1]
    episode_mean = total[..., :1] / episode_count.clamp(min=1)
    baseline = torch.where(count > 0, total / count.clamp(min=1), episode_mean)
    return torch.where(reached & (episode_count > 0), returns - baseline, 0.0)


def prefix_values(ids: Tensor, scores: Tensor, counted: Tensor | None = None) -> Tensor:
    """V of every prefix of every response: the mean score of the prompt's counted responses that begin with it.

    It is 0 if no counted response begins with it.

    Example: responses a b, a c, d with scores 1, 3, 8: V is 4 for the empty prefix, 2 for a, 1 for a b, 8 for d.

    Args:
        ids: shape ``(P, K, R)``, tokens of the responses, −1 after their ends.
        scores: shape ``(P, K)``.
        counted: shape ``(P, K)``, bool, or ``None`` if all responses count.

    Returns:
        Shape ``(P, K, R + 1)``: column j is the value after j tokens. After a response's end it is the mean score of
        the responses that equal it.
    """
    counted = _all_if_none(counted, scores)
    totals = scores.new_zeros(*ids.shape[:2], ids.shape[2] + 1)
    counts = torch.zeros_like(totals)
    # One response at a time: comparing all pairs at once would take K times the memory.
    for k in range(ids.shape[1]):
        same_so_far = (ids == ids[:, k : k + 1]).cumprod(2, dtype=torch.uint8)
        empty_prefix = torch.ones_like(same_so_far[..., :1])
        same_prefix = torch.cat([empty_prefix, same_so_far], 2).bool()
        included = same_prefix & counted[:, k, None, None]
        totals = totals + torch.where(included, scores[:, k, None, None], 0.0)
        counts = counts + included
    return totals / counts.clamp(min=1)


def _all_if_none(counted: Tensor | None, scores: Tensor) -> Tensor:
    """`counted`, or True for every score."""
    if counted is None:
        return torch.ones_like(scores, dtype=torch.bool)
    return counted
