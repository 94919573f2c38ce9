# SPDX-License-Identifier: Apache-2.0
"""Credit assignment as the flags say: `dschat.rl.ppo_batch` or `rloo_batch`, between normalised scores and advantages.

Moments of scores and of advantages are those of all ranks.
"""

from dataclasses import replace
from typing import TypedDict

import torch
from torch import Tensor

from dschat.config.ppo import PPOConfig
from dschat.rl.masked import masked_moments, whiten, whiten_rows
from dschat.rl.ppo_batch import ppo_batch
from dschat.rl.rewards import ScoreMoments
from dschat.rl.rloo_batch import rloo_batch
from dschat.rl.types import MacroActions, PPOBatch, ScoredRollout, Trajectory
from dschat.run.distributed import sum_over_ranks


class _Rewards(TypedDict):
    """What token rewards depend on; see `dschat.rl.rewards`."""

    kl_coef: float
    kl_estimator: str
    clip_reward_value: float | None
    missing_eos_penalty: float | None


def with_scores(moments: ScoreMoments, scored: ScoredRollout) -> ScoreMoments:
    """The running moments with the scores of a rollout on all ranks, the same on every rank. Every rank must call it.

    Rows without a response token count for nothing, they have no score; nor do numbers that are not finite.
    """
    counted = scored.response_mask.any(1) & scored.scores.isfinite()
    scores = torch.where(counted, scored.scores, 0.0).double()
    count, total = sum_over_ranks(torch.stack([counted.sum().double(), scores.sum()])).tolist()
    mean = total / max(count, 1.0)
    distances = torch.where(counted, scores - mean, 0.0)
    return moments.merged(count, mean, float(sum_over_ranks(distances.square().sum())))


def assign_credit(
    trajectory: Trajectory,
    ends: Tensor | MacroActions,
    kl_coef: float,
    config: PPOConfig,
    samples: int = 1,
    moments: ScoreMoments | None = None,
) -> PPOBatch:
    """Macro actions, advantages and, of a critic, returns.

    With --normalize_scores, scores are normalised first; --missing_eos_penalty and --clip_reward_value then count in
    standard deviations. The batch's trajectory keeps the scores as they were given.

    Args:
        trajectory: of this rank.
        ends: (B, R) bool, True where a macro action ends; or the macro actions.
        kl_coef: of this iteration; with --adaptive_kl_target it is not the flag's.
        config: the flags.
        samples: responses of each prompt, which are rows in succession.
        moments: of the scores so far, with --normalize_scores.
    """
    given = trajectory
    if moments is not None:
        trajectory = replace(trajectory, scores=moments.normalised(trajectory.scores))
    rewards = _Rewards(
        kl_coef=kl_coef,
        kl_estimator=config.kl_estimator,
        clip_reward_value=config.clip_reward_value,
        missing_eos_penalty=config.missing_eos_penalty,
    )
    if config.has_critic:
        batch = ppo_batch(
            trajectory,
            ends,
            gamma=config.gamma,
            lam=config.lam,
            value_function=config.value_function,
            macro_reward=config.macro_reward,
            **rewards,
        )
    else:
        batch = rloo_batch(trajectory, ends, samples, **rewards)
    batch = replace(batch, trajectory=given)
    if config.normalized_over == "row":
        return replace(batch, advantages=whiten_rows(batch.advantages, batch.response_mask))
    return whiten_advantages(batch) if config.normalized_over == "batch" else batch


def whiten_advantages(batch: PPOBatch) -> PPOBatch:
    """The batch with advantages of mean 0 and variance 1 over the response tokens of all ranks."""
    totals = torch.stack(masked_moments(batch.advantages, batch.response_mask))
    count, total, squares = sum_over_ranks(totals).unbind()
    advantages = whiten(batch.advantages, batch.response_mask, (count, total, squares))
    return replace(batch, advantages=advantages)
