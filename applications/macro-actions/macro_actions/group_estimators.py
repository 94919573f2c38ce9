# SPDX-License-Identifier: Apache-2.0
"""Estimators that compare the responses of a prompt with each other: RLOO, GRPO, Dr. GRPO, TEMPO.

They are rows of `macro_actions.estimators.ESTIMATORS`; the comparisons are those of `macro_actions.groups`.
Shapes: B rows, R response positions, M macro actions, P prompts with K samples each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from macro_actions.groups import dr_grpo, grpo, grpo_divisor, prefix_values, rloo, rloo_turns
from macro_actions.masked import last_true
from macro_actions.returns import discounted_sums
from macro_actions.segments import pool_rewards, segment, to_tokens
from macro_actions.settings import EstimatorSettings
from macro_actions.trajectory_rewards import batch_without_returns, penalised_scores, response_penalty, rewards_and_kl
from macro_actions.types import MacroActions, PPOBatch, Trajectory


def rloo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """RLOO (Ahmadian et al. 2024, "Back to Basics"): a response's reward minus the mean reward of its prompt's others.

    The reward includes the KL penalty, and nothing is divided by a standard deviation. A response without tokens could
    not be scored and is left out of the others' mean. All tokens of a response share its advantage, whatever the macro
    actions; macro actions matter to the policy ratio only, see `macro_actions.segments.macro_logprobs`.

    Example: rewards 1, 2, 6 of one prompt's responses give advantages −3, −1.5, 4.5.

    Raises:
        ValueError: B is not a multiple of the samples per prompt.
    """
    rewards, kl = rewards_and_kl(trajectory, settings)
    mask = trajectory.response_mask
    response_rewards = _by_group(rewards.sum(1), settings)
    counted = _by_group(mask.any(1), settings)
    advantages = rloo(response_rewards, counted).flatten()
    token_advantages = torch.where(mask, advantages[:, None], 0.0)
    return batch_without_returns(trajectory, macro, kl, rewards, token_advantages)


def rloo_turns_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """RLOO by turns: the return from a turn on minus that of the prompt's other responses that reached the turn.

    A turn is a run of the response mask, whatever the macro actions; its reward is the sum of its token rewards, KL
    penalty included, and ``gamma`` discounts from turn to turn. See :func:`macro_actions.groups.rloo_turns` for the
    baseline. With one turn in each response this is :func:`rloo_batch`.

    Raises:
        ValueError: B is not a multiple of the samples per prompt.
    """
    rewards, kl = rewards_and_kl(trajectory, settings)
    mask = trajectory.response_mask
    turns = segment(last_true(mask), mask)
    returns = discounted_sums(pool_rewards(rewards, turns), turns, settings.gamma)
    reached = _by_group(turns.mask, settings)
    advantages = rloo_turns(_by_group(returns, settings), reached).flatten(0, 1)
    return batch_without_returns(trajectory, macro, kl, rewards, to_tokens(advantages, turns))


def grpo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """GRPO (Shao et al. 2024): (score − mean of the prompt's scores) / their standard deviation, plus the KL penalty.

    The penalty of a response is neither compared nor scaled, see :func:`response_penalty`.

    Example: scores 1, 2, 6 with KLs of .1, 0, .2 nats and a coefficient of .5 give −2/√7 − .05, −1/√7, 3/√7 − .1.
    """
    return _group_batch(trajectory, macro, settings, grpo)


def dr_grpo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """Dr. GRPO (Liu et al. 2025): GRPO without the division, which would weight prompts by their difficulty.

    Its loss is divided by a constant length, see `macro_actions.losses.loss_weights`. REINFORCE++ with a baseline (Hu
    et al. 2025) has this advantage, too; the trainer normalises it over the batch, without the KL penalty.
    """
    return _group_batch(trajectory, macro, settings, dr_grpo)


def tempo_batch(trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
    """TEMPO (Tran et al. 2025): Â_τ = (score − mean + V(after τ) − V(before τ)) / (std + ε), plus the KL penalty.

    V of a prefix is the mean score of the prompt's responses that begin with it, see
    :func:`macro_actions.groups.prefix_values`. V(after) − V(before) is therefore 0 except where responses part.
    Macro actions of one token give the paper's estimator. The KL penalty is added as in :func:`grpo_batch`.

    Raises:
        ValueError: a response mask has holes, so that the text between turns is a part of the prefixes.
    """
    rewards, kl = rewards_and_kl(trajectory, settings)
    mask = trajectory.response_mask
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("tempo compares prefixes of single responses: response masks with holes are not supported.")
    scores = _by_group(_compared_scores(trajectory, settings), settings)
    counted = _by_group(mask.any(1), settings)

    # Advantage of the whole response within its group.
    response_advantages = grpo(scores, counted).flatten()

    # What each macro action adds to the value of the prefix, in the same unit.
    ids = torch.where(mask, trajectory.rollout.response_ids, -1)
    values = prefix_values(_by_group(ids, settings), scores, counted).flatten(0, 1)
    tokens_after = macro.lengths.cumsum(1)
    tokens_before = tokens_after - macro.lengths
    gains = values.gather(1, tokens_after) - values.gather(1, tokens_before)
    divisor = grpo_divisor(scores, counted).expand_as(scores).reshape(-1, 1)
    parts = gains / divisor

    penalty = response_penalty(kl, settings.kl_coef)
    advantages = response_advantages[:, None] + parts + penalty[:, None]
    advantages = torch.where(macro.mask, advantages, 0.0)
    return batch_without_returns(trajectory, macro, kl, rewards, to_tokens(advantages, macro))


def _compared_scores(trajectory: Trajectory, settings: EstimatorSettings) -> Tensor:
    """Scores by which a group's responses are compared: with penalties, clamped, without the KL. Shape (B,)."""
    scores = penalised_scores(trajectory, settings)
    bound = settings.clip_reward_value
    return scores if bound is None else scores.clamp(-bound, bound)


def _group_batch(
    trajectory: Trajectory,
    macro: MacroActions,
    settings: EstimatorSettings,
    compare: Callable[[Tensor, Tensor], Tensor],
) -> PPOBatch:
    """Batch in which a response has one advantage: its score compared with its prompt's, plus its KL penalty."""
    rewards, kl = rewards_and_kl(trajectory, settings)
    mask = trajectory.response_mask
    scores = _by_group(_compared_scores(trajectory, settings), settings)
    counted = _by_group(mask.any(1), settings)
    advantages = compare(scores, counted).flatten() + response_penalty(kl, settings.kl_coef)
    token_advantages = torch.where(mask, advantages[:, None], 0.0)
    return batch_without_returns(trajectory, macro, kl, rewards, token_advantages)


def _by_group(x: Tensor, settings: EstimatorSettings) -> Tensor:
    """Rows by prompt: (B, …) → (P, K, …). Raises ValueError if B is not a multiple of K."""
    if len(x) % settings.samples:
        raise ValueError(f"{len(x)} rows are not {settings.samples} samples of each prompt")
    return x.unflatten(0, (-1, settings.samples))
