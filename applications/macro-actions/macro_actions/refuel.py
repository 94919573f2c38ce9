# SPDX-License-Identifier: Apache-2.0
"""Pairs of replies to one state, as REFUEL trains on them, and their rewards. All numbers are float32.

In tensors of shape (2N,), the first N entries belong to the first replies of N pairs, the others to the second replies
in the same order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from macro_actions.masked import Totals, whiten
from macro_actions.types import Rollout


@dataclass(frozen=True)
class PairBatch:
    """A batch of pairs that REFUEL's regression trains on.

    Attributes:
        rollout: 2N rows: the state of a dialogue's turn as the prompt, the reply as the response.
        logprobs: shape ``(2N,)``, Σ log π_t over the reply's tokens, for the policy that sampled it.
        ref_logprobs: shape ``(2N,)``, that sum for the frozen reference; without a reference equal to ``logprobs``.
        scores: shape ``(2N,)``, of whole dialogues.
        rewards: shape ``(2N,)``, of the replies.
    """

    rollout: Rollout
    logprobs: Tensor
    ref_logprobs: Tensor
    scores: Tensor
    rewards: Tensor

    @property
    def kl(self) -> Tensor:
        """Estimates of the KL to the reference, in nats per reply. Shape (2N,)."""
        return self.logprobs - self.ref_logprobs

    @property
    def reward_differences(self) -> Tensor:
        """ΔR, the first reply's reward minus the second's. Shape (N,)."""
        first, second = self.rewards.chunk(2)
        return first - second


def reply_rewards(scores: Tensor, finished: Tensor, kl: Tensor, kl_coef: float, penalty: float) -> Tensor:
    """R = score − kl_coef · KL, where ``penalty`` replaces the score of a reply that was cut.

    Args:
        scores: shape ``(B,)``, of whole dialogues.
        finished: shape ``(B,)``, bool, True if the reply ended by itself.
        kl: shape ``(B,)``, log π_t(y|s) − log π_ref(y|s) of the reply.
        kl_coef: weight of the KL penalty.
        penalty: score of a dialogue whose reply was cut.

    Returns:
        Shape ``(B,)``.
    """
    return scores.where(finished, penalty) - kl_coef * kl


def whiten_rewards(rewards: Tensor, totals: Totals) -> Tensor:
    """Shift and scale rewards, shape (B,), to mean 0 and variance 1 under totals of all rewards."""
    everything = torch.ones_like(rewards, dtype=torch.bool)
    return whiten(rewards, everything, totals)
