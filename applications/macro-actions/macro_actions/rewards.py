# SPDX-License-Identifier: Apache-2.0
"""Token rewards: the KL penalty on every token and the score on the last one; KL estimators and controllers; running
moments of scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from macro_actions.masked import last_of_row


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Per-token estimate of KL(π‖π_ref) from one sample (Schulman 2020), with d = logprobs − ref_logprobs.

        k1   d                  unbiased
        k2   d² / 2             biased, with low variance
        k3   exp(−d) − 1 + d    unbiased, never negative

    Args:
        logprobs: shape ``(B, R)``.
        ref_logprobs: shape ``(B, R)``.
        estimator: ``k1``, ``k2`` or ``k3``.

    Returns:
        Shape ``(B, R)``, in nats.

    Raises:
        ValueError: the estimator is unknown.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return torch.exp(-d) - 1 + d
    raise ValueError(f"estimator must be k1, k2 or k3, not {estimator!r}")


def token_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kl_estimator: str = "k1",
    clip_reward_value: float | None = None,
    segment_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """r_j = −kl_coef · kl_j on response tokens, plus the score on the last one.

    If macro actions have rewards of their own, these are added on their tokens, and the last token gets the rest of
    the score. Example: a score of 5 with segment rewards 1 and 3 leaves 1 for the last token.

    Args:
        logprobs: shape ``(B, R)``.
        ref_logprobs: shape ``(B, R)``.
        scores: shape ``(B,)``, from the reward function.
        response_mask: shape ``(B, R)``, bool, with or without holes.
        kl_coef: weight of the KL penalty.
        kl_estimator: see :func:`kl_estimate`.
        clip_reward_value: scores are clamped to ± this value first; not at all with ``None``.
        segment_rewards: shape ``(B, R)``, parts of the scores.

    Returns:
        rewards and kl, shape ``(B, R)`` each, 0 off the response. A row without response tokens gets no score.
    """
    kl = kl_estimate(logprobs, ref_logprobs, kl_estimator)
    kl = torch.where(response_mask, kl, 0.0)
    rewards = -kl_coef * kl

    if clip_reward_value is not None:
        scores = scores.clamp(-clip_reward_value, clip_reward_value)
    if segment_rewards is not None:
        segment_rewards = torch.where(response_mask, segment_rewards, 0.0)
        rewards = rewards + segment_rewards
        scores = scores - segment_rewards.sum(1)

    is_last = last_of_row(response_mask)
    score_rewards = torch.where(is_last, scores[:, None], torch.zeros_like(logprobs))
    return rewards + score_rewards, kl


def penalise_missing_eos(scores: Tensor, finished: Tensor, penalty: float | None) -> Tensor:
    """Subtract ``penalty`` from the scores of responses without EOS.

    Args:
        scores: shape ``(B,)``.
        finished: shape ``(B,)``, bool, False if the response was cut.
        penalty: scores stay as they are with ``None``.

    Returns:
        Shape ``(B,)``.
    """
    if penalty is None:
        return scores
    return torch.where(finished, scores, scores - penalty)


def penalise_length(scores: Tensor, lengths: Tensor, longest: int, buffer: int | None, penalty: float = 1.0) -> Tensor:
    """DAPO's soft length penalty (Yu et al. 2025), linear over the last ``buffer`` tokens before ``longest``.

    Example: longest 100, buffer 20, penalty 1: 0 up to 80 tokens, .5 for 90, 1 for 100.

    Args:
        scores: shape ``(B,)``.
        lengths: shape ``(B,)``, response lengths in tokens.
        longest: length in tokens at which the penalty reaches its maximum.
        buffer: tokens over which the penalty grows; no penalty with ``None``.
        penalty: the maximum.

    Returns:
        Scores minus the penalty, shape ``(B,)``.
    """
    if buffer is None:
        return scores
    excess = lengths - (longest - buffer)
    share = (excess / buffer).clamp(0, 1)
    return scores - penalty * share.to(scores.dtype)


@dataclass(frozen=True)
class ScoreMoments:
    """Running mean and variance of scores, merged batch by batch (Chan, Golub & LeVeque 1983).

    Attributes:
        count: number of scores.
        mean: their mean.
        squares: sum of their squared distances from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, count: float, mean: float, squares: float) -> ScoreMoments:
        """Moments of these scores together with a batch of scores, which is given by its moments."""
        total = self.count + count
        if total == 0:
            return self
        distance = mean - self.mean
        between = distance**2 * self.count * count / total
        return ScoreMoments(
            count=total, mean=self.mean + distance * count / total, squares=self.squares + squares + between
        )

    @property
    def deviation(self) -> float:
        """√(variance + 1e-8), with the biased variance (divided by the count); 1 before there are scores."""
        if not self.count:
            return 1.0
        return math.sqrt(self.squares / self.count + 1e-8)

    def normalised(self, scores: Tensor) -> Tensor:
        """(score − mean) / deviation, any shape; unchanged before there are scores."""
        centred = scores.double() - self.mean
        return (centred / self.deviation).to(scores.dtype)


@dataclass(frozen=True)
class FixedKL:
    """A constant KL coefficient."""

    value: float

    def update(self, kl: float, num_samples: int) -> FixedKL:
        """The controller itself, since the measured KL has no effect."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that steers the KL per response to a target (Ziegler et al. 2019, §2.2).

    Attributes:
        value: the current coefficient.
        target: in nats per response.
        horizon: in responses; the coefficient reacts more slowly with a longer one.
    """

    value: float
    target: float
    horizon: float

    def update(self, kl: float, num_samples: int) -> AdaptiveKL:
        """Controller after ``num_samples`` responses with a mean KL of ``kl`` nats per response.

        The coefficient changes by a fifth at most; more responses than the horizon count as the horizon.
        """
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        horizons = min(num_samples / self.horizon, 1.0)
        return replace(self, value=self.value * (1 + error * horizons))


def kl_controller(kl_coef: float, target: float | None, horizon: float) -> FixedKL | AdaptiveKL:
    """Controller that starts at ``kl_coef``: adaptive with a target in nats per response, constant with ``None``."""
    if target is None:
        return FixedKL(kl_coef)
    return AdaptiveKL(kl_coef, target, horizon)
