# SPDX-License-Identifier: Apache-2.0
"""Credit assignment: advantages as the flags say, computed before an update or by its own forward passes.

An estimator of `macro_actions.estimators` assigns credit; scores and advantages may be normalised, by moments over all
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dschat.models.layout import Layout
from dschat.run.distributed import sum_over_ranks
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.metrics import critic_gate
from dschat.training.ppo.score import ScoredRows
from macro_actions.estimators import ESTIMATORS, Estimator, with_mean_baseline, with_teacher
from macro_actions.masked import masked_moments, whiten, whiten_rows
from macro_actions.rewards import ScoreMoments
from macro_actions.trajectory_rewards import penalised, response_penalty
from macro_actions.types import MacroActions, PPOBatch, ScoredRollout, Trajectory, select_rows, trim

AssignCredit = Callable[[Trajectory, MacroActions], PPOBatch]


class Credit:
    """Advantages of a rollout of B rows, as an update reads them.

    They are known before the update, or come from its own forward passes where a rollout has one update: the policy
    that samples is then the one that is updated, so that separate passes over the rollout would compute the same
    log-probs and values once more. Credit assignment works on any subset of rows, and so micro-batch by micro-batch.
    """

    def __init__(self, rows: PPOBatch | ScoredRows, assign: AssignCredit | None = None) -> None:
        """Takes rows with their advantages; or rows without log-probs, and a function that computes the advantages."""
        if isinstance(rows, ScoredRows):
            zeros = torch.zeros_like(rows.scored.ref_logprobs)
            rows = replace(rows, logprobs=zeros, values=zeros.clone())
        self.rows = rows
        self._assign = assign

    @property
    def is_known(self) -> bool:
        """Whether the advantages are known before the update."""
        return isinstance(self.rows, PPOBatch)

    @property
    def loss_mask(self) -> Tensor:
        """Shape (B, R), bool: tokens that the policy's loss is about."""
        return self.rows.policy_mask if isinstance(self.rows, PPOBatch) else self.rows.response_mask

    @property
    def checked(self) -> PPOBatch | ScoredRollout:
        """The batch as far as it is known before the update, to be checked for numbers that are not finite."""
        return self.rows if isinstance(self.rows, PPOBatch) else self.rows.scored

    def record(self, layout: Layout, logprobs: Tensor, values: Tensor) -> None:
        """Takes the log-probs and values (b, R') of rows whose advantages are not known, before `part` reads them."""
        assert isinstance(self.rows, ScoredRows) and self.rows.logprobs is not None and self.rows.values is not None
        self.rows.logprobs[layout.rows, : layout.width] = logprobs.detach()
        self.rows.values[layout.rows, : layout.width] = values.detach()

    def part(self, layout: Layout) -> PPOBatch:
        """A micro-batch of b rows."""
        return self._assigned(trim(select_rows(self.rows, layout.rows), layout.width))

    def whole(self) -> PPOBatch:
        """The whole batch; available after the update's first pass over all rows."""
        return self._assigned(self.rows)

    def _assigned(self, rows: PPOBatch | ScoredRows) -> PPOBatch:
        if isinstance(rows, PPOBatch):
            return rows
        assert self._assign is not None  # it comes with rows without log-probs
        return self._assign(rows.trajectory, rows.macro)


def with_scores(moments: ScoreMoments, scored: ScoredRollout) -> ScoreMoments:
    """Running moments that include the scores of a rollout on all ranks. Every rank must call it.

    Rows without a response token have no score and do not count; nor do scores that are not finite.
    """
    counted = scored.response_mask.any(1) & scored.scores.isfinite()
    scores = torch.where(counted, scored.scores, 0.0).double()
    totals = torch.stack([counted.sum().double(), scores.sum()])
    count, total = sum_over_ranks(totals).tolist()
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
    """Advantages and, with a critic, returns.

    With --normalize_scores, scores are normalised first; --missing_eos_penalty and --clip_reward_value then count in
    standard deviations. The batch's trajectory keeps the scores as their source gave them. A teacher's log-ratios are
    added last, and are not normalised.

    Args:
        trajectory: rows of this rank.
        macro: their macro actions.
        kl_coef: coefficient of the KL penalty in this iteration; --adaptive_kl_target changes it.
        config: the flags.
        samples: responses to each prompt, in rows that follow each other.
        moments: moments of the scores so far, with --normalize_scores.
        estimator: replaces that of --advantage_estimator.
    """
    # The KL is a part of the rewards or a term of the loss, never both.
    kl_in_rewards = kl_coef if config.loss.kl_in == "reward" else 0.0
    longest = config.sampling.max_answer_seq_len
    settings = replace(config.estimator, kl_coef=kl_in_rewards, samples=samples, longest=longest)

    normalised = trajectory
    if moments is not None:
        segment_rewards = trajectory.segment_rewards
        if segment_rewards is not None:
            segment_rewards = segment_rewards / moments.deviation
        scores = moments.normalised(trajectory.scores)
        normalised = replace(trajectory, scores=scores, segment_rewards=segment_rewards)

    assign = ESTIMATORS[config.advantages.advantage_estimator] if estimator is None else estimator
    batch = assign(normalised, macro, settings)
    if config.advantages.needs.gates_critic and estimator is None:
        gate = critic_gate(batch, settings)
        if not gate.is_open:
            batch = with_mean_baseline(batch, gate.mean_return, settings)
    counted = tokens_that_count(
        batch, samples, config.advantages.drop_equal_groups, config.advantages.max_token_probability
    )
    batch = replace(batch, trajectory=trajectory, counted=counted)

    penalty: Tensor | None = None
    if config.advantages.needs.kl_apart and estimator is None:
        penalty = response_penalty(batch.kl, settings.kl_coef)
    batch = normalise(batch, config.advantages.normalized_over, penalty)
    if config.critic.cut_answers == "critic_only":  # they count above, in what advantages are compared with
        batch = replace(batch, counted=batch.policy_mask & trajectory.rollout.finished[:, None])
    beta = config.critic.critic_group_weight
    if beta is not None and samples > 1:
        from dschat.training.ppo.groups import weights_of_groups

        weights = weights_of_groups(trajectory, samples, beta, config.critic.critic_group_weight_min)
        batch = replace(batch, critic_weights=weights)
    if config.has_teacher:
        by_macro_action = config.advantages.needs.macro_actions
        batch = with_teacher(batch, config.teacher.teacher_coef, by_macro_action, settings)
    return batch


def trained_scores(
    scores: Tensor, finished: Tensor, lengths: Tensor, config: PPOConfig, moments: ScoreMoments | None
) -> Tensor:
    """Scores as they are trained on, (B,): normalised, less penalties, clamped.

    Args:
        scores: shape ``(B,)``, as their source gave them.
        finished: shape ``(B,)``, bool, whether the response ended by itself.
        lengths: shape ``(B,)``, tokens of each response.
        config: the flags.
        moments: moments of the scores so far, with --normalize_scores.
    """
    if moments is not None:
        scores = moments.normalised(scores)
    settings = replace(config.estimator, longest=config.sampling.max_answer_seq_len)
    scores = penalised(scores, finished, lengths, settings)
    limit = settings.clip_reward_value
    return scores if limit is None else scores.clamp(-limit, limit)


def tokens_that_count(batch: PPOBatch, samples: int, drop_equal: bool, max_probability: float | None) -> Tensor | None:
    """Tokens that the policy's loss is about, (B, R) bool; None for all response tokens.

    Args:
        batch: B rows; the samples of a prompt follow each other.
        samples: responses to each prompt.
        drop_equal: leave out prompts whose responses all have the same score (DAPO, Yu et al. 2025).
        max_probability: leave out tokens that the sampling policy gave a higher probability (SPO, Guo et al. 2025).
    """
    mask = batch.response_mask
    if drop_equal and samples > 1:
        from dschat.training.ppo.groups import equal_groups

        is_equal = equal_groups(batch.trajectory.scores, mask, samples).repeat_interleave(samples)
        mask = mask & ~is_equal[:, None]
    if max_probability is not None:
        mask = mask & (batch.trajectory.logprobs <= math.log(max_probability))
    return None if mask is batch.response_mask else mask


def normalise(batch: PPOBatch, over: str | None, penalty: Tensor | None = None) -> PPOBatch:
    """The batch with advantages of mean 0 and variance 1 over each row's tokens, or those of all ranks.

    Args:
        batch: B rows; the tokens are those that the policy's loss is about.
        over: ``row``, ``batch``, or None: the advantages stay as they are.
        penalty: shape ``(B,)``, a part of each row's advantages that is not normalised: it is taken out before and
            added afterwards.
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
    """The batch with advantages of mean 0 and variance 1 over all tokens of the policy's loss, on all ranks."""
    totals = torch.stack(masked_moments(batch.advantages, batch.policy_mask))
    count, total, squares = sum_over_ranks(totals).unbind()
    advantages = whiten(batch.advantages, batch.policy_mask, (count, total, squares))
    return replace(batch, advantages=advantages)
