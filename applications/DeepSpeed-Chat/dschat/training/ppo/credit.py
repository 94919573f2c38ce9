# SPDX-License-Identifier: Apache-2.0
"""Credit assignment as the flags say: an estimator of `macro_actions.estimators`; scores and advantages normalised.

Moments of scores and of advantages are those of all ranks.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from dschat.run.distributed import sum_over_ranks
from dschat.settings.ppo import PPOConfig
from macro_actions.estimators import ESTIMATORS, Estimator, penalised, response_penalty
from macro_actions.groups import are_equal
from macro_actions.masked import masked_moments, whiten, whiten_rows
from macro_actions.rewards import ScoreMoments
from macro_actions.types import MacroActions, PPOBatch, ScoredRollout, Trajectory


def with_scores(moments: ScoreMoments, scored: ScoredRollout | Trajectory) -> ScoreMoments:
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
    macro: MacroActions,
    kl_coef: float,
    config: PPOConfig,
    samples: int = 1,
    moments: ScoreMoments | None = None,
    estimator: Estimator | None = None,
) -> PPOBatch:
    """Advantages and, of a critic, returns.

    With --normalize_scores, scores are normalised first; --missing_eos_penalty and --clip_reward_value then count in
    standard deviations. The batch's trajectory keeps the scores as they were given.

    Args:
        trajectory: of this rank.
        macro: its macro actions.
        kl_coef: of this iteration; with --adaptive_kl_target it is not the flag's.
        config: the flags.
        samples: responses of each prompt, which are rows in succession.
        moments: of the scores so far, with --normalize_scores.
        estimator: that of --advantage_estimator when None.
    """
    given = trajectory
    # As a term of the loss, the KL is no part of the rewards.
    in_rewards = kl_coef if config.loss.kl_in == "reward" else 0.0
    longest = config.sampling.max_answer_seq_len
    settings = replace(config.estimator, kl_coef=in_rewards, samples=samples, longest=longest)
    if moments is not None:
        own = trajectory.segment_rewards
        trajectory = replace(
            trajectory,
            scores=moments.normalised(trajectory.scores),
            segment_rewards=None if own is None else own / moments.deviation,
        )
    assign = ESTIMATORS[config.advantages.advantage_estimator] if estimator is None else estimator
    batch = assign(trajectory, macro, settings)
    counted = tokens_that_count(
        batch, samples, config.advantages.drop_equal_groups, config.advantages.max_token_probability
    )
    batch = replace(batch, trajectory=given, counted=counted)
    if config.advantages.needs.kl_apart and estimator is None:
        return normalise(batch, config.advantages.normalized_over, response_penalty(batch.kl, settings.kl_coef))
    return normalise(batch, config.advantages.normalized_over)


def trained_scores(
    scores: Tensor, finished: Tensor, lengths: Tensor, config: PPOConfig, moments: ScoreMoments | None
) -> Tensor:
    """Scores (B,) as they are trained on: normalised, less penalties, clamped. Finished and lengths are (B,)."""
    if moments is not None:
        scores = moments.normalised(scores)
    settings = replace(config.estimator, longest=config.sampling.max_answer_seq_len)
    scores = penalised(scores, finished, lengths, settings)
    most = settings.clip_reward_value
    return scores if most is None else scores.clamp(-most, most)


def tokens_that_count(batch: PPOBatch, samples: int, drop_equal: bool, max_probability: float | None) -> Tensor | None:
    """(B, R) bool: the tokens that the policy's loss is of; None for all of the response.

    Args:
        batch: of B rows, samples of a prompt in succession.
        samples: of a prompt.
        drop_equal: leave out prompts whose responses all have the same score (DAPO, Yu et al. 2025).
        max_probability: leave out tokens that were likelier under the policy that drew them (SPO, Guo et al. 2025).
    """
    mask = batch.response_mask
    if drop_equal and samples > 1:
        mask = mask & ~equal_groups(batch.trajectory, samples).repeat_interleave(samples)[:, None]
    if max_probability is not None:
        mask = mask & (batch.trajectory.logprobs <= math.log(max_probability))
    return None if mask is batch.response_mask else mask


def equal_groups(trajectory: Trajectory, samples: int) -> Tensor:
    """(P,) bool: prompts whose responses, `samples` rows in succession, all have the same score, as it was given."""
    by_prompt = (x.unflatten(0, (-1, samples)) for x in (trajectory.scores, trajectory.response_mask.any(1)))
    return are_equal(*by_prompt)


def normalise(batch: PPOBatch, over: str | None, penalty: Tensor | None = None) -> PPOBatch:
    """The batch with advantages of mean 0 and variance 1 over each row's tokens, or those of all ranks.

    Args:
        batch: of B rows; the tokens are those that the policy's loss is of.
        over: ``row``, ``batch``, or None: the advantages stay as they are.
        penalty: (B,), a part of each row's advantages that is left out and then added as it is.
    """
    if over is None:
        return batch
    apart = torch.zeros_like(batch.advantages)
    if penalty is not None:
        apart = torch.where(batch.response_mask, penalty[:, None], apart)
    compared = replace(batch, advantages=batch.advantages - apart)
    if over == "row":
        advantages = whiten_rows(compared.advantages, batch.policy_mask)
    else:
        advantages = whiten_advantages(compared).advantages
    return replace(batch, advantages=advantages + torch.where(batch.policy_mask, apart, 0.0))


def whiten_advantages(batch: PPOBatch) -> PPOBatch:
    """The batch with advantages of mean 0 and variance 1 over the tokens of all ranks that the policy's loss is of."""
    totals = torch.stack(masked_moments(batch.advantages, batch.policy_mask))
    count, total, squares = sum_over_ranks(totals).unbind()
    advantages = whiten(batch.advantages, batch.policy_mask, (count, total, squares))
    return replace(batch, advantages=advantages)
