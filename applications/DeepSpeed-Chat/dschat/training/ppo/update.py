# SPDX-License-Identifier: Apache-2.0
"""The optimiser updates of one PPO iteration: epochs × updates × micro-batches, of the actor and of the critic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dschat.models.engines import Trained, TrainedPolicy, TrainedScalar
from dschat.models.layout import Integers, Layout, Lengths, PassSize, lay_out
from dschat.run.distributed import sum_over_ranks, world_size
from dschat.run.metrics import Means
from dschat.run.stop import raise_if_stopped
from dschat.settings.batches import BatchPlan
from dschat.settings.ppo import PPOConfig
from dschat.settings.ppo_loss import LossFlags
from dschat.training.iteration import Metrics, UpdateProgress, micro_batches, pass_size, run_updates
from dschat.training.ppo.credit import Credit
from dschat.training.ppo.metrics import explained_share, fit_totals
from dschat.training.ppo.models import trained_engines
from macro_actions.losses import kl_loss, loss_count, loss_weights, policy_loss, token_weights, value_loss
from macro_actions.rewards import kl_estimate
from macro_actions.segments import macro_logprobs, sequence_logprobs
from macro_actions.types import PPOBatch, select_rows

# Sums over the critic's last pass, see `fit_totals`. They are among the statistics, so that a stopped run keeps them.
FIT = tuple(f"fit/{number}" for number in range(6))


@dataclass(frozen=True)
class Update:
    """One step of the actor's optimiser, of the critic's, or of both.

    Attributes:
        rows: shape ``(n,)``, rows of the rollout on this rank.
        trains_actor: whether the actor is trained.
        trains_critic: whether the critic is trained.
        is_measured: whether it belongs to the critic's last pass of several, whose values are compared with returns.
    """

    rows: Integers
    trains_actor: bool
    trains_critic: bool
    is_measured: bool = False


@dataclass(frozen=True)
class UpdateContext:
    """What the updates of one rollout have in common.

    Attributes:
        actor: the policy's engine.
        critic: the value model's engine, if there is one.
        credit: this rank's rows with their advantages.
        config: the flags.
        plan: batch sizes of the actor.
        kl_coef: coefficient of the KL as a term of the policy's loss.
        critic_alone: leave the actor and its optimiser as they are (--critic_warmup_updates).
    """

    actor: TrainedPolicy
    critic: TrainedScalar | None
    credit: Credit
    config: PPOConfig
    plan: BatchPlan
    kl_coef: float = 0.0
    critic_alone: bool = False

    def engines(self, update: Update) -> dict[str, Trained]:
        """The engines that an update trains, by name."""
        critic = self.critic if update.trains_critic else None
        return trained_engines(self.actor, critic, critic_alone=not update.trains_actor)

    def pass_size(self, update: Update) -> PassSize:
        """Maximum size of an update's forward and backward passes."""
        return pass_size(self.plan if update.trains_actor else self.config.critic_plan(self.plan))

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.credit.loss_mask.device


def ppo_update(
    context: UpdateContext,
    seed: int,
    progress: UpdateProgress | None = None,
    left_out: Callable[[int, Update], bool] = lambda done, update: False,
) -> Metrics:
    """Trains actor and critic (if any) on one rollout. The trained engines must be in training mode.

    Rows are shuffled into updates, see `updates_of_rollout`; inside an update, micro-batches hold rows of similar
    length. Every loss is divided by the count of the whole update over all ranks, so that neither the micro-batch size
    nor the order matters.

    Args:
        context: engines, rows and flags.
        seed: seed of the shuffling, the same on every rank.
        progress: updates that are done already, see `run_updates`.
        left_out: gets the number of steps before this update, and the update; see `run_updates`.

    Returns:
        Means over the updates, named policy/…, loss/… and val/…, and what else `run_updates` returns.

    Raises:
        Stopped: soon after a signal, see `dschat.run.stop`.
    """
    lengths = Lengths.of(context.credit.rows.rollout)
    updates = updates_of_rollout(len(lengths.totals), context.plan, context.config, seed, context.critic_alone)

    def update(part: Update, means: Means) -> None:
        _one_update(context, part, lengths, means)

    updates_after = updates_after_steps(updates, context.plan.updates_per_rollout)
    progress = progress or UpdateProgress()
    updates = without_masked_actor(updates, context.credit)
    metrics = run_updates(updates, progress, update, left_out, context.engines, updates_after=updates_after)
    totals = [metrics.pop(name) for name in FIT if name in metrics]
    if totals:
        metrics["val/explained_variance_after"] = explained_share(totals)
    return metrics


def without_masked_actor(updates: Sequence[Update], credit: Credit) -> list[Update]:
    """Updates that leave the actor as it is where none of their tokens counts in the policy's loss, on any rank.

    Its gradient is 0 there, but Adam's momentum and weight decay would move the weights. Every rank must call it.

    Args:
        updates: the updates of a rollout.
        credit: this rank's rows with their advantages.
    """
    tokens = credit.loss_mask.sum(1)
    counts = [tokens[torch.as_tensor(update.rows, device=tokens.device)].sum() for update in updates]
    trained = []
    for update, count in zip(updates, sum_over_ranks(torch.stack(counts)).tolist(), strict=True):
        trained.append(replace(update, trains_actor=update.trains_actor and count > 0))
    return trained


def updates_after_steps(steps: Sequence[Update], updates_per_rollout: int) -> list[int]:
    """Updates of the run's count after each step: those of the actor; while it warms up, a share of the critic's."""
    counted = list(accumulate(int(step.trains_actor) for step in steps))
    if counted[-1]:
        return counted
    return [number * updates_per_rollout // len(steps) for number in range(1, len(steps) + 1)]


def updates_of_rollout(
    count: int, plan: BatchPlan, config: PPOConfig, seed: int, critic_alone: bool = False
) -> list[Update]:
    """The optimiser steps on one rollout, in order.

    Actor and critic are trained together on the rows of an update, unless one of them makes more passes or the critic
    has updates of its own (--critic_epochs, --critic_minibatches). Steps of the critic then come before the actor's
    on the same rows, and passes of one model alone before those of both. Credit is assigned before, so that the order
    changes nothing but what a run that is stopped between them has trained.

    Args:
        count: rows of the rollout on this rank.
        plan: batch sizes of the actor.
        config: the flags.
        seed: seed of the order of the rows in each pass, the same on every rank.
        critic_alone: leave the actor out (--critic_warmup_updates).
    """
    actor_epochs = 0 if critic_alone else config.rollouts.ppo_epochs
    critic_epochs = config.critic_passes
    epochs = max(actor_epochs, critic_epochs)
    minibatches = config.critic.critic_minibatches
    rows_of_all = rows_of_updates(count, plan.update_per_rank, epochs, seed)
    updates_per_epoch = len(rows_of_all) // epochs
    updates: list[Update] = []
    for number, rows in enumerate(rows_of_all):
        epochs_left = epochs - number // updates_per_epoch
        trains_actor = epochs_left <= actor_epochs
        trains_critic = epochs_left <= critic_epochs
        is_measured = epochs_left == 1 and critic_epochs > 1
        if trains_critic and minibatches > 1:
            updates += [Update(part, False, True, is_measured) for part in np.split(rows, minibatches)]
            trains_critic = False
        if trains_actor or trains_critic:
            updates.append(Update(rows, trains_actor, trains_critic, is_measured))
    return updates


def trained_lengths(updates: Sequence[Update], totals: Integers, has_critic: bool) -> list[Integers]:
    """Lengths of the sequences that updates train the actor on, and the critic if there is one; shape (n,) each.

    Args:
        updates: the updates.
        totals: shape ``(B,)``, tokens of each row of the rollout.
        has_critic: whether there is a critic.
    """
    nothing = np.zeros(0, dtype=np.int64)
    actor_rows = [nothing, *(update.rows for update in updates if update.trains_actor)]
    critic_rows = [nothing, *(update.rows for update in updates if update.trains_critic)]
    lengths = [totals[np.concatenate(actor_rows)]]
    if has_critic:
        lengths.append(totals[np.concatenate(critic_rows)])
    return lengths


def rows_of_updates(count: int, update_size: int, ppo_epochs: int, seed: int) -> list[Integers]:
    """Row numbers of each update on this rank; every rank gives the same seed.

    Args:
        count: rows of the rollout.
        update_size: rows of an update.
        ppo_epochs: passes over the rollout.
        seed: seed of the order of the rows in each pass.
    """
    shuffle = np.random.RandomState(seed % 2**32)
    updates = []
    for _ in range(ppo_epochs):
        order = shuffle.permutation(count)
        updates += [order[start : start + update_size] for start in range(0, count, update_size)]
    return updates


@dataclass(frozen=True)
class UpdateCounts:
    """Denominators of an update's sums: counts over all ranks, 0-d tensors, at least 1.

    Attributes:
        loss: the policy loss's denominator, see `macro_actions.losses.loss_count`.
        measured: what the policy's statistics are means over.
        tokens: response tokens.
    """

    loss: Tensor
    measured: Tensor
    tokens: Tensor


def _count_update(context: UpdateContext, rows: Tensor, num_tokens: Tensor) -> UpdateCounts:
    """Counts of an update over all ranks, from this rank's rows (N,) and their number of response tokens."""
    config = context.config
    loss_mean = config.loss.mean_of_loss
    loss_mask = context.credit.loss_mask[rows]
    macro = select_rows(context.credit.rows.macro, rows)
    count = loss_count(loss_mean, macro, loss_mask, config.sampling.max_answer_seq_len)
    local_counts = torch.stack([num_tokens.float(), count])
    totals = sum_over_ranks(local_counts).clamp(min=1)
    tokens, loss = totals.unbind()
    measured = loss
    if loss_mean == "length":  # its denominator is a constant; statistics are means over tokens
        measured = sum_over_ranks(loss_mask.sum().float()).clamp(min=1)
    return UpdateCounts(loss, measured, tokens)


def _one_update(context: UpdateContext, update: Update, lengths: Lengths, means: Means) -> None:
    """Runs one optimiser step on some rows, in micro-batches; adds statistics to the means."""
    rows = update.rows
    num_tokens = torch.as_tensor(lengths.sampled[rows].sum(), device=context.device)
    counts = _count_update(context, torch.as_tensor(rows, device=context.device), num_tokens)
    for group in micro_batches(lengths.totals[rows], context.pass_size(update), context.engines(update).values()):
        raise_if_stopped()
        layout = lay_out(context.credit.rows.rollout, rows[group], lengths)
        shares = _train_micro_batch(context, update, layout, counts)
        means.add_sums(shares)
    means.weigh(shares, 1 / world_size())


def _train_micro_batch(
    context: UpdateContext, update: Update, layout: Layout, counts: UpdateCounts
) -> dict[str, Tensor]:
    """Forward and backward passes on b rows; their shares of the update's statistics.

    The critic's forward pass comes after the actor's backward pass, so that one of them has activations in memory at a
    time, unless credit assignment needs its values. An actor that is not trained computes log-probs for that alone.
    """
    credit = context.credit
    trains_actor = update.trains_actor
    outputs: Tensor | None = None
    if trains_actor or not credit.is_known:
        with torch.set_grad_enabled(trains_actor):
            token_logprobs, entropy = context.actor(
                layout.input_ids, None, layout.targets, context.config.sampling.temperature, trains_actor
            )
        new_logprobs = layout.spread(token_logprobs)
        if not credit.is_known:
            assert context.critic is not None  # only credit of a critic comes from these passes
            outputs = _critic_outputs(context.critic, layout)
            credit.record(layout, new_logprobs, context.critic.module.numbers(outputs))

    part = credit.part(layout)
    stats: dict[str, Tensor] = {}
    if trains_actor:
        stats |= _actor_step(context, part, new_logprobs, counts)
        stats["policy/entropy"] = entropy.sum() / counts.tokens
    if context.critic is not None and update.trains_critic:
        if outputs is None:
            outputs = _critic_outputs(context.critic, layout)
        stats |= _critic_step(context.critic, part, outputs, counts.tokens, context.config.loss)
        if update.is_measured:
            values = context.critic.module.numbers(outputs.detach())
            assert part.returns is not None  # there is a critic
            stats |= zip(FIT, fit_totals(values, part.returns, part.response_mask), strict=True)
    return stats


def _critic_outputs(critic: TrainedScalar, layout: Layout) -> Tensor:
    """The head's outputs for V(x, y_<j) of the responses, (b, R') or of K bins (b, R', K), differentiable."""
    return layout.before(critic(layout.input_ids, None, raw=True))


def _actor_step(
    context: UpdateContext, part: PPOBatch, new_logprobs: Tensor, counts: UpdateCounts
) -> dict[str, Tensor]:
    """Backward pass of the actor on b rows with their log-probs (b, R'); its shares of the update's statistics."""
    config = context.config
    flags = config.loss
    mask = part.policy_mask
    weights = loss_weights(flags.mean_of_loss, part.macro, mask)
    ratio_logprobs = _logprobs_of_ratio(new_logprobs, part, flags)
    old_logprobs = _logprobs_of_ratio(part.trajectory.logprobs, part, flags)

    # Correct for an engine that sampled with other log-probs than the actor's.
    advantages = part.advantages
    drawn_logprobs = old_logprobs
    if part.rollout.drawn_logprobs is not None:
        drawn_logprobs = _logprobs_of_ratio(part.rollout.drawn_logprobs, part, flags)
    clip = config.vllm.rollout_is_clip
    shares: dict[str, Tensor] = {}
    if clip is not None:
        from macro_actions.importance import importance_weights

        advantages = advantages * importance_weights(old_logprobs, drawn_logprobs, clip)
        if part.rollout.drawn_logprobs is not None:
            is_clipped = old_logprobs - drawn_logprobs > math.log(clip)
            clipped = (token_weights(mask, weights) * is_clipped).sum() / counts.measured
            shares["rollout/importance_clipped"] = clipped

    if flags.rollout_is_mask is not None:
        from macro_actions.importance import masked_policy_loss

        low, high = flags.rollout_is_mask
        loss, stats = masked_policy_loss(
            ratio_logprobs, drawn_logprobs, advantages, mask, low, high, counts.loss, weights
        )
    else:
        loss, stats = policy_loss(
            ratio_logprobs, old_logprobs, advantages, mask, flags.cliprange, counts.loss, weights, flags.cliprange_high
        )
    to_mean = counts.loss / counts.measured
    shares |= {
        "loss/policy": loss,
        "policy/approxkl": stats["approxkl"] * to_mean,
        "policy/clipfrac": stats["clipfrac"] * to_mean,
        "val/ratio": stats["ratio"] * to_mean,
    }
    if context.kl_coef:
        policy_logprobs = torch.where(mask, new_logprobs, 0.0)
        reference = torch.where(mask, part.trajectory.ref_logprobs, 0.0)
        kl_per_token = kl_estimate(policy_logprobs, reference, config.estimator.kl_estimator)
        kl = kl_loss(kl_per_token, mask, counts.loss, weights)
        loss = loss + context.kl_coef * kl
        shares["loss/kl"] = kl
    context.actor.backward(loss)
    context.actor.step()
    return shares


def _logprobs_of_ratio(logprobs: Tensor, part: PPOBatch, flags: LossFlags) -> Tensor:
    """Log-probs (b, R') that the ratio compares, on each token: of the token, its macro action or the response."""
    if flags.policy_ratio == "token":
        return logprobs
    if flags.policy_ratio == "sequence_mean":
        return sequence_logprobs(logprobs, part.response_mask)
    return macro_logprobs(logprobs, part.macro, flags.policy_ratio)


def _critic_step(
    critic: TrainedScalar, part: PPOBatch, outputs: Tensor, num_tokens: Tensor, flags: LossFlags
) -> dict[str, Tensor]:
    """Backward pass of the critic on one micro-batch; its shares of the update's statistics."""
    values = part.trajectory.values
    returns = part.returns
    assert values is not None and returns is not None  # there is a critic
    mask = part.response_mask
    weights = part.critic_weights
    bins = critic.module.bins
    if bins is None:
        loss, stats = value_loss(outputs, values, returns, mask, flags.cliprange_value, num_tokens, weights)
    else:
        from macro_actions.value_bins import binned_value_loss

        loss, stats = binned_value_loss(outputs, returns, mask, bins, num_tokens, weights)
    critic.backward(flags.vf_coef * loss)
    critic.step()
    return {"loss/value": loss} | {f"val/{name}": share for name, share in stats.items()}
