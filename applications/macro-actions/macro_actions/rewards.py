# SPDX-License-Identifier: Apache-2.0
"""Token rewards: the KL penalty on every token and the score on the last one; running moments of scores; KL estimators
and controllers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from macro_actions.masked import last_true


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Per-token estimate of KL(π‖π_ref) from one sample (Schulman 2020), with d = logprobs − ref_logprobs.

    Args:
        logprobs, ref_logprobs: (B, R).
        estimator: ``k1`` d (unbiased), ``k2`` d²/2, ``k3`` exp(−d) − 1 + d (unbiased, never negative).

    Returns:
        (B, R) in nats.

    Raises:
        ValueError: unknown estimator.
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
    """r_j = −kl_coef · kl_j on the response, plus the score at its last token.

    Where macro actions have rewards of their own, these stand on their tokens, and at the last token what they leave
    of the score: 5 with rewards 1 and 3 leaves 1.

    Args:
        logprobs, ref_logprobs: (B, R).
        scores: (B,) from the reward function.
        response_mask: (B, R) bool, a prefix of each row.
        kl_coef: weight of the penalty.
        kl_estimator: see :func:`kl_estimate`.
        clip_reward_value: clamps scores to ± this first, if given.
        segment_rewards: (B, R), parts of the scores.

    Returns:
        rewards (B, R) and kl (B, R), both 0 off the response. A row without response tokens gets no score.
    """
    zeros = torch.zeros_like(logprobs)
    kl = torch.where(response_mask, kl_estimate(logprobs, ref_logprobs, kl_estimator), zeros)
    if clip_reward_value is not None:
        scores = scores.clamp(-clip_reward_value, clip_reward_value)
    rewards = -kl_coef * kl
    if segment_rewards is not None:
        own = torch.where(response_mask, segment_rewards, zeros)
        rewards, scores = rewards + own, scores - own.sum(1)
    return rewards + torch.where(last_true(response_mask), scores[:, None], zeros), kl


def penalise_missing_eos(scores: Tensor, finished: Tensor, penalty: float | None) -> Tensor:
    """Subtracts ``penalty`` from the scores (B,) of responses that were cut: ``finished`` (B,) bool is False."""
    if penalty is None:
        return scores
    return torch.where(finished, scores, scores - penalty)


def penalise_length(scores: Tensor, lengths: Tensor, longest: int, buffer: int | None, penalty: float = 1.0) -> Tensor:
    """DAPO's soft penalty (Yu et al. 2025): from ``longest`` − ``buffer`` tokens on it grows in a line to ``penalty``.

    Example: longest 100, buffer 20, penalty 1 → 0 up to 80 tokens, .5 for 90, 1 for 100.

    Args:
        scores: (B,).
        lengths: (B,) of the responses, in tokens.
        longest: tokens that a response may have.
        buffer: tokens over which the penalty grows; None = no penalty.
        penalty: the largest one.

    Returns:
        (B,) scores minus the penalty.
    """
    if buffer is None:
        return scores
    return scores - penalty * ((lengths - (longest - buffer)) / buffer).clamp(0, 1).to(scores.dtype)


@dataclass(frozen=True)
class ScoreMoments:
    """Mean and variance of all scores so far, put together batch by batch (Chan, Golub & LeVeque 1983).

    Attributes:
        count: of scores.
        mean: theirs.
        squares: the sum of their squared distances from the mean.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, count: float, mean: float, squares: float) -> ScoreMoments:
        """Those of these scores and a batch together; the batch's moments mean what the attributes do."""
        total = self.count + count
        if total == 0:
            return self
        distance = mean - self.mean
        between = distance**2 * self.count * count / total
        return ScoreMoments(total, self.mean + distance * count / total, self.squares + squares + between)

    @property
    def deviation(self) -> float:
        """√(variance + 1e-8), of the biased variance (divided by the count); 1 where there were no scores yet."""
        return math.sqrt(self.squares / self.count + 1e-8) if self.count else 1.0

    def normalised(self, scores: Tensor) -> Tensor:
        """(score − mean) / deviation, any shape; as they are where there were no scores yet."""
        return ((scores.double() - self.mean) / self.deviation).to(scores.dtype)


@dataclass(frozen=True)
class FixedKL:
    """A KL coefficient that stays."""

    value: float

    def update(self, kl: float, num_samples: int) -> FixedKL:
        """Returns itself: the measured KL does not matter."""
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that steers the KL per sequence to a target (Ziegler et al. 2019, §2.2)."""

    value: float
    target: float  # nats per sequence
    horizon: float  # samples

    def update(self, kl: float, num_samples: int) -> AdaptiveKL:
        """The next controller, after ``num_samples`` responses with a mean KL of ``kl`` nats per sequence."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, value=self.value * (1 + error * num_samples / self.horizon))


def kl_controller(kl_coef: float, target: float | None, horizon: float) -> FixedKL | AdaptiveKL:
    """A coefficient that begins at ``kl_coef``: steered to ``target`` nats per sequence, fixed where that is None."""
    return FixedKL(kl_coef) if target is None else AdaptiveKL(kl_coef, target, horizon)
