# SPDX-License-Identifier: Apache-2.0
"""What estimators read of a trajectory's rewards: of tokens and of whole responses, with penalties.

Shapes: B rows, R response positions.
"""

import torch
from torch import Tensor

from macro_actions.masked import widths
from macro_actions.rewards import penalise_length, penalise_missing_eos, token_rewards
from macro_actions.settings import EstimatorSettings
from macro_actions.types import MacroActions, PPOBatch, Trajectory


def rewards_and_kl(trajectory: Trajectory, settings: EstimatorSettings) -> tuple[Tensor, Tensor]:
    """Token rewards and KL, shape (B, R) each; the score includes the penalties for a missing EOS and for length.

    In an episode the last token of each turn that was cut receives the penalty for a missing EOS.
    """
    segment_rewards = trajectory.segment_rewards
    cut_turns = trajectory.rollout.cut_turns
    if segment_rewards is not None and cut_turns is not None and settings.missing_eos_penalty is not None:
        segment_rewards = torch.where(cut_turns, segment_rewards - settings.missing_eos_penalty, segment_rewards)
    return token_rewards(
        trajectory.logprobs,
        trajectory.ref_logprobs,
        penalised_scores(trajectory, settings),
        trajectory.response_mask,
        settings.kl_coef,
        settings.kl_estimator,
        settings.clip_reward_value,
        segment_rewards,
    )


def penalised_scores(trajectory: Trajectory, settings: EstimatorSettings) -> Tensor:
    """Scores minus the penalties for a missing EOS, of the response or of each of its turns, and for length. (B,)."""
    scores = trajectory.scores
    finished = trajectory.rollout.finished
    cut_turns = trajectory.rollout.cut_turns
    if cut_turns is not None:
        if settings.missing_eos_penalty is not None:
            scores = scores - settings.missing_eos_penalty * cut_turns.sum(1)
        finished = torch.ones_like(finished)
    return penalised(scores, finished, widths(trajectory.response_mask), settings)


def penalised(scores: Tensor, finished: Tensor, lengths: Tensor, settings: EstimatorSettings) -> Tensor:
    """Scores minus the penalties for a missing EOS and for length.

    Args:
        scores: shape ``(B,)``.
        finished: shape ``(B,)``, bool, True if the response ends with EOS.
        lengths: shape ``(B,)``, response lengths in tokens.
        settings: the penalties.

    Returns:
        Shape ``(B,)``.
    """
    scores = penalise_missing_eos(scores, finished, settings.missing_eos_penalty)
    return penalise_length(scores, lengths, settings.longest, settings.length_buffer, settings.length_penalty)


def response_penalty(kl: Tensor, kl_coef: float) -> Tensor:
    """KL penalty of a whole response, −kl_coef · Σ_j kl_j.

    Estimators that compare scores within a group add it to the advantage of every token of the response.

    Args:
        kl: shape ``(B, R)`` in nats, 0 off the response.
        kl_coef: weight of the penalty.

    Returns:
        Shape ``(B,)``.
    """
    return -kl_coef * kl.sum(1)


def batch_without_returns(
    trajectory: Trajectory, macro: MacroActions, kl: Tensor, rewards: Tensor, advantages: Tensor
) -> PPOBatch:
    """Batch of an estimator that trains no critic."""
    return PPOBatch(trajectory, macro, kl=kl, rewards=rewards, advantages=advantages, returns=None)
