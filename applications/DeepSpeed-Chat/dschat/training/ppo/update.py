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
from dschat.settings.ppo_loss import LossFlags
from dschat.training.iteration import Metrics, UpdateProgress, micro_batches, run_updates
from dschat.training.ppo.models import trained_engines
from macro_actions.importance import importance_weights
from macro_actions.losses import kl_loss, loss_count, loss_weights, policy_loss, value_loss
from macro_actions.rewards import kl_estimate
from macro_actions.segments import macro_logprobs, sequence_logprobs
from macro_actions.types import MacroActions, PPOBatch, Rollout, ScoredRollout, Trajectory, select_rows, trim

Credit = Callable[[Trajectory, MacroActions], PPOBatch]


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
    config: PPOConfig,
    plan: BatchPlan,
    seed: int,
    progress: UpdateProgress | None = None,
    kl_coef: float = 0.0,
    left_out: Callable[[int, Tensor], bool] = lambda done, rows: False,
) -> Metrics:
    """Trains the actor and, where there is one, the critic on one rollout. Both engines are in training mode.

    Rows are shuffled into updates by `seed`, the same on every rank; inside an update micro-batches hold rows of
    similar length. Every loss is divided by the count of the whole update over all ranks, so that neither the
    micro-batch size nor the order matters.

    The batch is this rank's rows; a FusedCredit only where they make one update, for a critic. `kl_coef` is the
    coefficient of the KL as a term of the policy's loss. For `progress`,
    `left_out`, which gets an update's rows (N,), and what is returned see `dschat.training.iteration.run_updates`; the
    means are policy/…, loss/… and val/…. Raises Stopped, see `dschat.run.stop`.
    """
    known = batch if isinstance(batch, PPOBatch) else batch.pending
    lengths = Lengths.of(known.rollout)
    progress = progress or UpdateProgress()
    updates = rows_of_updates(len(lengths.totals), plan.update_per_rank, config.rollouts.ppo_epochs, seed)
    device, engines = known.response_mask.device, trained_engines(actor, critic)

    def update(rows: Integers, means: Means) -> None:
        _one_update(actor, critic, batch, rows, lengths, config, plan, kl_coef, means)

    def is_left_out(done: int, rows: Integers) -> bool:
        return left_out(done, torch.as_tensor(rows, device=device))

    return run_updates(updates, progress, update, is_left_out, engines)


def rows_of_updates(count: int, update_size: int, ppo_epochs: int, seed: int) -> list[Integers]:
    """Row numbers of each update on this rank; every rank gives the same seed.

    Args:
        count: rows of the rollout.
        update_size: rows of an update.
        ppo_epochs: passes over the rollout.
        seed: of the order of the rows in each pass.
    """
    shuffle = np.random.RandomState(seed % 2**32)
    orders = [shuffle.permutation(count) for _ in range(ppo_epochs)]
    starts = range(0, count, update_size)
    return [order[start : start + update_size] for order in orders for start in starts]


def _one_update(
    actor: TrainedPolicy,
    critic: TrainedScalar | None,
    batch: PPOBatch | FusedCredit,
    rows: Integers,
    lengths: Lengths,
    config: PPOConfig,
    plan: BatchPlan,
    kl_coef: float,
    means: Means,
) -> None:
    known = batch if isinstance(batch, PPOBatch) else batch.pending
    device = known.response_mask.device
    numbers = torch.as_tensor(rows, device=device)
    counted = (known.policy_mask if isinstance(known, PPOBatch) else known.response_mask)[numbers]
    loss_mean = config.loss.mean_of_loss
    count = loss_count(loss_mean, select_rows(known.macro, numbers), counted, config.sampling.max_answer_seq_len)
    own = torch.stack([torch.as_tensor(lengths.responses[rows].sum(), device=device).float(), count])
    num_tokens, count = sum_over_ranks(own).clamp(min=1).unbind()
    # By a constant length, the sum of weights is the number of tokens: what the statistics are means over.
    measured = count
    if loss_mean == "length":
        measured = sum_over_ranks(counted.sum().float()).clamp(min=1)
    size, engines = PassSize(plan.micro_batch, plan.max_tokens), trained_engines(actor, critic)
    for group in micro_batches(lengths.totals[rows], size, engines.values()):
        raise_if_stopped()
        chosen = lay_out(known.rollout, rows[group], lengths)
        new_values = None
        new_logprobs, entropy = _logprobs(actor, chosen, config.sampling.temperature)
        if isinstance(batch, PPOBatch):
            part = trim(select_rows(batch, chosen.rows), chosen.width)
        else:
            assert critic is not None  # credit would not be fused
            new_values = _values(critic, chosen)
            part = batch.part(chosen, new_logprobs, new_values)
        means.add_sums(_actor_step(actor, part, new_logprobs, count, measured, config, kl_coef))
        means.add_sum("policy/entropy", entropy.sum() / num_tokens)
        if critic is not None:
            new_values = _values(critic, chosen) if new_values is None else new_values
            means.add_sums(_critic_step(critic, part, new_values, num_tokens, config.loss))


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
    config: PPOConfig,
    kl_coef: float,
) -> dict[str, Tensor]:
    """One micro-batch of the actor; its share of the update's statistics, which are means over what is measured."""
    advantages, drawn, mask = part.advantages, part.rollout.drawn_logprobs, part.policy_mask
    flags = config.loss
    weights = loss_weights(flags.mean_of_loss, part.macro, mask)
    by_token = new_logprobs
    new_logprobs = _of_ratio(new_logprobs, part, flags)
    logprobs = _of_ratio(part.trajectory.logprobs, part, flags)
    clip = config.vllm.rollout_is_clip
    if clip is not None and drawn is not None:
        advantages = advantages * importance_weights(logprobs, _of_ratio(drawn, part, flags), clip)
    policy, stats = policy_loss(
        new_logprobs, logprobs, advantages, mask, flags.cliprange, count, weights, flags.cliprange_high
    )
    loss, extra = policy, {}
    if kl_coef:
        own, reference = (torch.where(mask, x, 0.0) for x in (by_token, part.trajectory.ref_logprobs))
        kl = kl_loss(kl_estimate(own, reference, config.estimator.kl_estimator), mask, count, weights)
        loss, extra = policy + kl_coef * kl, {"loss/kl": kl}
    actor.backward(loss)
    actor.step()
    return extra | {
        "loss/policy": policy,
        "policy/approxkl": stats["approxkl"] * (count / measured),
        "policy/clipfrac": stats["clipfrac"] * (count / measured),
        "val/ratio": stats["ratio"] * (count / measured),
    }


def _of_ratio(logprobs: Tensor, part: PPOBatch, flags: LossFlags) -> Tensor:
    """Log-probs (b, R') of what the ratio is of, on each token: the token, its macro action, or the response."""
    if flags.policy_ratio == "token":
        return logprobs
    if flags.policy_ratio == "sequence_mean":
        return sequence_logprobs(logprobs, part.response_mask)
    return macro_logprobs(logprobs, part.macro, flags.policy_ratio == "macro_mean")


def _critic_step(
    critic: TrainedScalar, part: PPOBatch, new_values: Tensor, num_tokens: Tensor, flags: LossFlags
) -> dict[str, Tensor]:
    values, returns, mask = part.trajectory.values, part.returns, part.response_mask
    assert values is not None and returns is not None  # of a critic
    loss, stats = value_loss(new_values, values, returns, mask, flags.cliprange_value, num_tokens)
    critic.backward(flags.vf_coef * loss)
    critic.step()
    return {"loss/value": loss, "val/clipfrac": stats["clipfrac"]}
