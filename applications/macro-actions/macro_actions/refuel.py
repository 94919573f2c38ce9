# SPDX-License-Identifier: Apache-2.0
"""Pairs of replies to one state, as REFUEL trains on them, and their rewards. Float32; N pairs.

Of every tensor of 2N numbers, the first N belong to the first replies and the others to the second ones, in the same
order.
"""

from dataclasses import dataclass

from torch import Tensor

from macro_actions.masked import Totals, whiten
from macro_actions.types import Rollout


@dataclass(frozen=True)
class PairBatch:
    """What the regression trains on."""

    rollout: Rollout  # 2N rows: the state of a dialogue's turn, and a reply to it
    logprobs: Tensor  # (2N,): Σ log π_t over the reply's tokens, of the policy that drew it
    ref_logprobs: Tensor  # (2N,): the same under the frozen reference; those of π_t where there is none
    scores: Tensor  # (2N,): of the whole dialogue
    rewards: Tensor  # (2N,): of the reply

    @property
    def kl(self) -> Tensor:
        """(2N,): estimates of the KL to the reference, in nats per reply."""
        return self.logprobs - self.ref_logprobs

    @property
    def reward_differences(self) -> Tensor:
        """(N,): ΔR, the first reply's reward minus the second's."""
        first, second = self.rewards.chunk(2)
        return first - second


def reply_rewards(scores: Tensor, finished: Tensor, kl: Tensor, kl_coef: float, penalty: float) -> Tensor:
    """R = score − kl_coef · KL, with `penalty` in the place of the score of a reply that was cut.

    Args:
        scores: (B,) of whole dialogues.
        finished: (B,) bool: the reply ended by itself.
        kl: (B,) log π_t(y|s) − log π_ref(y|s) of the reply.
        kl_coef: weight of the penalty on the KL.
        penalty: replaces the score of a dialogue whose reply was cut.

    Returns:
        (B,).
    """
    return scores.where(finished, penalty) - kl_coef * kl


def whiten_rewards(rewards: Tensor, totals: Totals) -> Tensor:
    """Shifts and scales rewards (B,) to mean 0 and variance 1 under totals over everything whitened together."""
    everything = rewards.new_ones(rewards.shape).bool()
    return whiten(rewards, everything, totals)
