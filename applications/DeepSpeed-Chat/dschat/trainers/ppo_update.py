# SPDX-License-Identifier: Apache-2.0
"""The optimiser updates of one PPO iteration: PPO epochs × updates × micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat.models.engines import TrainedPolicy, TrainedScalar
from dschat.models.layout import Integers, Layout, Lengths, PassSize, lay_out
from dschat.run.distributed import sum_over_ranks
from dschat.run.metrics import Means
from dschat.run.stop import raise_if_stopped
from dschat.settings.batches import BatchPlan
from dschat.settings.ppo import PPOConfig
from dschat.trainers.iteration import Metrics, UpdateProgress, micro_batches, run_updates
from dschat.trainers.ppo_models import trained_engines
from macro_actions.importance import importance_weights
from macro_actions.losses import kl_loss, loss_count, loss_weights, policy_loss, value_loss
from macro_actions.rewards import kl_estimate
from macro_actions.segments import macro_logprobs, sequence_logprobs
from macro_actions.types import MacroActions, PPOBatch, Rollout, ScoredRollout, Trajectory, select_rows, trim

Credit = Callable[[Trajectory, MacroActions], PPOBatch]


@dataclass(frozen=True)
class UpdateSettings:
    """What the updates depend on."""

    update_size: int  # rows of one update on this rank
    micro_batch: int  # rows of one forward pass
    ppo_epochs: int
    cliprange: float
    cliprange_value: float
    temperature: float
    cliprange_high: float | None = None  # of the policy's ratio above 1; cliprange when None
    policy_ratio: str = "token"  # token, macro, macro_mean or sequence_mean
    loss_mean: str = "token"  # see `macro_actions.losses.loss_weights`
    longest: int = 0  # tokens of a response, the constant of the loss_mean length
    kl_coef: float = 0.0  # of the KL as a term of the loss
    kl_estimator: str = "k3"  # of that term
    rollout_is_clip: float | None = None  # largest importance weight; None = no weights
    vf_coef: float = 1.0  # multiplies the critic's loss
    max_tokens: int | None = None  # of one forward pass, padding included; None = any

    @classmethod
    def from_config(cls, config: PPOConfig, plan: BatchPlan) -> UpdateSettings:
        return cls(
            update_size=plan.update_per_rank,
            micro_batch=plan.micro_batch,
            ppo_epochs=config.ppo_epochs,
            cliprange=config.cliprange,
            cliprange_value=config.cliprange_value,
            cliprange_high=config.cliprange_high,
            loss_mean=config.mean_of_loss,
            longest=config.max_answer_seq_len,
            kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
            kl_estimator=config.kl_estimator,
            temperature=config.temperature,
            policy_ratio=config.policy_ratio,
            rollout_is_clip=config.rollout_is_clip,
            vf_coef=config.vf_coef,
            max_tokens=plan.max_tokens,
        )


@dataclass(frozen=True)
class PendingBatch:
    """A rollout and its macro actions, before actor and critic are asked."""

    scored: ScoredRollout
    macro: MacroActions

    @property
    def rollout(self) -> Rollout:
        """What was sampled."""
        return self.scored.rollout

    @property
    def response_mask(self) -> Tensor:
        """(B, R) bool, the rollout's."""
        return self.scored.response_mask


class FusedCredit:
    """Log-probs and values from the update's own forward passes, where a rollout has one update.

    The policy that samples is the one that is updated, so a separate pass over the rollout would compute the same
    numbers once more. Credit assignment works on any subset of rows, and so micro-batch by micro-batch.
    """

    def __init__(self, pending: PendingBatch, credit: Credit) -> None:
        """Takes a batch of B rows, and what gives a trajectory's advantages and returns, row by row."""
        self.pending, self._credit = pending, credit
        self._logprobs, self._values = torch.zeros_like(pending.scored.ref_logprobs).repeat(2, 1, 1).unbind()

    def part(self, rows: Layout, logprobs: Tensor, values: Tensor) -> PPOBatch:
        """The micro-batch of some rows, from the models' numbers (b, R') of them; kept for `batch`."""
        logprobs, values = logprobs.detach(), values.detach()
        self._logprobs[rows.rows, : rows.width], self._values[rows.rows, : rows.width] = logprobs, values
        part = trim(select_rows(self.pending, rows.rows), rows.width)
        return self._credit(part.scored.with_numbers(logprobs, values), part.macro)

    def batch(self) -> PPOBatch:
        """All rows, after the update."""
        return self._credit(self.pending.scored.with_numbers(self._logprobs, self._values), self.pending.macro)


def ppo_update(
    actor: TrainedPolicy,
    critic: TrainedScalar | None,
    batch: PPOBatch | FusedCredit,
    settings: UpdateSettings,
    seed: int,
    progress: UpdateProgress | None = None,
    left_out: Callable[[int, Tensor], bool] = lambda done, rows: False,
) -> Metrics:
    """Trains the actor and, where there is one, the critic on one rollout. Both engines are in training mode.

    Rows are shuffled into updates by `seed`, the same on every rank; inside an update micro-batches hold rows of
    similar length. Every loss is divided by the count of the whole update over all ranks, so that neither the
    micro-batch size nor the order matters.

    The batch is this rank's rows; a FusedCredit only where they make one update, for a critic. For `progress`,
    `left_out`, which gets an update's rows (N,), and what is returned see `dschat.trainers.iteration.run_updates`; the
    means are policy/…, loss/… and val/…. Raises Stopped, see `dschat.run.stop`.
    """
    known = batch if isinstance(batch, PPOBatch) else batch.pending
    lengths = Lengths.of(known.rollout)
    progress = progress or UpdateProgress()
    updates = rows_of_updates(len(lengths.totals), settings, seed)
    device, engines = known.response_mask.device, trained_engines(actor, critic)

    def update(rows: Integers, means: Means) -> None:
        _one_update(actor, critic, batch, rows, lengths, settings, means)

    def is_left_out(done: int, rows: Integers) -> bool:
        return left_out(done, torch.as_tensor(rows, device=device))

    return run_updates(updates, progress, update, is_left_out, engines)


def rows_of_updates(count: int, settings: UpdateSettings, seed: int) -> list[Integers]:
    """Row numbers of each update on this rank, which has so many rows; every rank gives the same seed."""
    shuffle = np.random.RandomState(seed % 2**32)
    orders = [shuffle.permutation(count) for _ in range(settings.ppo_epochs)]
    starts = range(0, count, settings.update_size)
    return [order[start : start + settings.update_size] for order in orders for start in starts]


def _one_update(
    actor: TrainedPolicy,
    critic: TrainedScalar | None,
    batch: PPOBatch | FusedCredit,
    rows: Integers,
    lengths: Lengths,
    settings: UpdateSettings,
    means: Means,
) -> None:
    known = batch if isinstance(batch, PPOBatch) else batch.pending
    device = known.response_mask.device
    numbers = torch.as_tensor(rows, device=device)
    counted = (known.policy_mask if isinstance(known, PPOBatch) else known.response_mask)[numbers]
    count = loss_count(settings.loss_mean, select_rows(known.macro, numbers), counted, settings.longest)
    own = torch.stack([torch.as_tensor(lengths.responses[rows].sum(), device=device).float(), count])
    num_tokens, count = sum_over_ranks(own).clamp(min=1).unbind()
    # By a constant length, the sum of weights is the number of tokens: what the statistics are means over.
    measured = count
    if settings.loss_mean == "length":
        measured = sum_over_ranks(counted.sum().float()).clamp(min=1)
    size, engines = PassSize(settings.micro_batch, settings.max_tokens), trained_engines(actor, critic)
    for group in micro_batches(lengths.totals[rows], size, engines.values()):
        raise_if_stopped()
        chosen = lay_out(known.rollout, rows[group], lengths)
        new_values = None
        new_logprobs, entropy = _logprobs(actor, chosen, settings.temperature)
        if isinstance(batch, PPOBatch):
            part = trim(select_rows(batch, chosen.rows), chosen.width)
        else:
            assert critic is not None  # credit would not be fused
            new_values = _values(critic, chosen)
            part = batch.part(chosen, new_logprobs, new_values)
        means.add_sums(_actor_step(actor, part, new_logprobs, count, measured, settings))
        means.add_sum("policy/entropy", entropy.sum() / num_tokens)
        if critic is not None:
            new_values = _values(critic, chosen) if new_values is None else new_values
            means.add_sums(_critic_step(critic, part, new_values, num_tokens, settings))


def _logprobs(actor: TrainedPolicy, rows: Layout, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs (b, R') of the responses, differentiable, and entropies (N,) of their tokens."""
    logprobs, entropy = actor(rows.input_ids, None, rows.targets, temperature)
    return rows.spread(logprobs), entropy


def _values(critic: TrainedScalar, rows: Layout) -> Tensor:
    """V(x, y_<j) of the responses (b, R'), differentiable."""
    return rows.before(critic(rows.input_ids, None))


def _actor_step(
    actor: TrainedPolicy,
    part: PPOBatch,
    new_logprobs: Tensor,
    count: Tensor,
    measured: Tensor,
    settings: UpdateSettings,
) -> dict[str, Tensor]:
    """One micro-batch of the actor; its share of the update's statistics, which are means over what is measured."""
    advantages, drawn, mask = part.advantages, part.rollout.drawn_logprobs, part.policy_mask
    weights = loss_weights(settings.loss_mean, part.macro, mask)
    by_token = new_logprobs
    new_logprobs, logprobs = (_of_ratio(x, part, settings) for x in (new_logprobs, part.trajectory.logprobs))
    if settings.rollout_is_clip is not None and drawn is not None:
        advantages = advantages * importance_weights(
            logprobs, _of_ratio(drawn, part, settings), settings.rollout_is_clip
        )
    clips = settings.cliprange, settings.cliprange_high
    policy, stats = policy_loss(new_logprobs, logprobs, advantages, mask, clips[0], count, weights, clips[1])
    loss, extra = policy, {}
    if settings.kl_coef:
        own, reference = (torch.where(mask, x, 0.0) for x in (by_token, part.trajectory.ref_logprobs))
        kl = kl_loss(kl_estimate(own, reference, settings.kl_estimator), mask, count, weights)
        loss, extra = policy + settings.kl_coef * kl, {"loss/kl": kl}
    actor.backward(loss)
    actor.step()
    return extra | {
        "loss/policy": policy,
        "policy/approxkl": stats["approxkl"] * (count / measured),
        "policy/clipfrac": stats["clipfrac"] * (count / measured),
        "val/ratio": stats["ratio"] * (count / measured),
    }


def _of_ratio(logprobs: Tensor, part: PPOBatch, settings: UpdateSettings) -> Tensor:
    """Log-probs (b, R') of what the ratio is of, on each token: the token, its macro action, or the response."""
    if settings.policy_ratio == "token":
        return logprobs
    if settings.policy_ratio == "sequence_mean":
        return sequence_logprobs(logprobs, part.response_mask)
    return macro_logprobs(logprobs, part.macro, settings.policy_ratio == "macro_mean")


def _critic_step(
    critic: TrainedScalar, part: PPOBatch, new_values: Tensor, num_tokens: Tensor, settings: UpdateSettings
) -> dict[str, Tensor]:
    values, returns, mask = part.trajectory.values, part.returns, part.response_mask
    assert values is not None and returns is not None  # of a critic
    loss, stats = value_loss(new_values, values, returns, mask, settings.cliprange_value, num_tokens)
    critic.backward(settings.vf_coef * loss)
    critic.step()
    return {"loss/value": loss, "val/clipfrac": stats["clipfrac"]}
