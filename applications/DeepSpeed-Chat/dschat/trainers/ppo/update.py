# SPDX-License-Identifier: Apache-2.0
"""The optimiser updates of one PPO iteration: PPO epochs × updates × micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dschat.config.batches import BatchPlan
from dschat.config.ppo import PPOConfig
from dschat.models.engines import TrainedPolicy, TrainedScalar
from dschat.rl.importance import importance_weights
from dschat.rl.losses import policy_loss, value_loss
from dschat.rl.macro_actions import macro_logprobs, token_weights
from dschat.rl.masked import masked_sum
from dschat.rl.types import PPOBatch, select_rows, trim
from dschat.run.distributed import sum_over_ranks
from dschat.run.metrics import Means
from dschat.run.stop import raise_if_stopped
from dschat.trainers.checks import COUNTED
from dschat.trainers.ppo.trajectory import response_values

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UpdateSettings:
    """What the updates depend on."""

    update_size: int  # rows of one update on this rank
    micro_batch: int  # rows of one forward pass
    ppo_epochs: int
    cliprange: float
    cliprange_value: float
    temperature: float
    policy_ratio: str = "token"  # token, macro or macro_mean
    rollout_is_clip: float | None = None  # largest importance weight; None = no weights

    @classmethod
    def from_config(cls, config: PPOConfig, plan: BatchPlan) -> UpdateSettings:
        """What the flags say."""
        return cls(
            update_size=plan.update_per_rank,
            micro_batch=plan.micro_batch,
            ppo_epochs=config.ppo_epochs,
            cliprange=config.cliprange,
            cliprange_value=config.cliprange_value,
            temperature=config.temperature,
            policy_ratio=config.policy_ratio,
            rollout_is_clip=config.rollout_is_clip,
        )


@dataclass
class UpdateProgress:
    """How far the updates of an iteration are: how many are done, and what was measured in them."""

    done: int = 0
    means: Means = field(default_factory=Means)
    skipped: Counter[str] = field(default_factory=Counter)  # by metric


def ppo_update(
    actor: TrainedPolicy,
    critic: TrainedScalar,
    batch: PPOBatch,
    settings: UpdateSettings,
    seed: int,
    progress: UpdateProgress | None = None,
    left_out: Callable[[int, Tensor], bool] = lambda done, rows: False,
) -> dict[str, float]:
    """Trains actor and critic on one rollout.

    Rows are shuffled into updates; inside an update micro-batches hold rows of similar length. Every loss is divided
    by the count of the whole update over all ranks, so that neither the micro-batch size nor the order matters.

    Args:
        actor: engine of a PolicyModel, in training mode.
        critic: engine of a ScalarModel, in training mode.
        batch: this rank's rows.
        settings: sizes and clipping.
        seed: of the shuffle; the same on every rank.
        progress: where an interrupted call stopped; it is kept up to date, update by update.
        left_out: called at the end of each update with the number of those before it and the update's rows (N,).
            Says whether numbers were not finite, so that a model left the update out and its statistics do not count.

    Raises:
        Stopped: see `dschat.run.stop`.

    Returns:
        Means over the updates: policy/…, loss/…, val/…, and the gradient norms of those that were applied; and, where
        there are such, skipped/actor and skipped/critic, the number of updates that fp16 left out, and
        skipped/nonfinite, the number of those that count for nothing.
    """
    response_lengths = batch.response_mask.sum(1)
    prompt_lengths = batch.trajectory.rollout.attention_mask.sum(1) - response_lengths
    sizes = torch.stack([prompt_lengths, response_lengths], dim=1).cpu().numpy()
    shuffle = np.random.RandomState(seed % 2**32)
    progress = progress or UpdateProgress()
    orders = [shuffle.permutation(len(sizes)) for _ in range(settings.ppo_epochs)]
    starts = range(0, len(sizes), settings.update_size)
    updates = [order[start : start + settings.update_size] for order in orders for start in starts]
    for rows in updates[progress.done :]:
        means = progress.means.copy()  # an update that is stopped half-way leaves nothing behind
        rows = rows[np.argsort(sizes[rows].sum(1), kind="stable")]
        _one_update(actor, critic, batch, rows, sizes, settings, means)
        if left_out(progress.done, torch.as_tensor(rows, device=batch.response_mask.device)):
            progress.skipped[COUNTED] += 1
        else:
            _note_norms(actor, critic, means, progress.skipped)
            progress.means = means
        progress.done += 1
    # Every update added its shares of each statistic, so that their sum is divided by the number of updates here. The
    # gradient norms were added as means.
    counted = progress.done - progress.skipped[COUNTED]
    metrics = {
        name: number if name.startswith("grad_norm/") else number / counted
        for name, number in progress.means.reduce().items()
    }
    return metrics | {name: float(count) for name, count in progress.skipped.items() if count}


def _note_norms(actor: TrainedPolicy, critic: TrainedScalar, means: Means, skipped: Counter[str]) -> None:
    for name, engine in (("actor", actor), ("critic", critic)):
        if engine.skipped:
            skipped[f"skipped/{name}"] += 1
        else:
            means.add(f"grad_norm/{name}", engine.grad_norm)


def _one_update(
    actor: TrainedPolicy,
    critic: TrainedScalar,
    batch: PPOBatch,
    rows: Integers,
    sizes: Integers,
    settings: UpdateSettings,
    means: Means,
) -> None:
    """One optimiser update of both models; adds its statistics to ``means``."""
    device = batch.response_mask.device
    num_macro = batch.macro.mask.sum(1)[torch.as_tensor(rows, device=device)].sum()
    own = torch.stack([torch.as_tensor(sizes[rows, 1].sum(), device=device), num_macro]).float()
    num_tokens, num_macro = sum_over_ranks(own).clamp(min=1).unbind()
    micro_batches = [rows[i : i + settings.micro_batch] for i in range(0, len(rows), settings.micro_batch)]
    for chosen in micro_batches:
        raise_if_stopped()
        prompt_width, response_width = sizes[chosen].max(0).tolist()
        part = select_rows(batch, torch.as_tensor(chosen, device=device))
        part = trim(part, prompt_width, max(response_width, 1))
        means.add_sums(_actor_step(actor, part, num_tokens, num_macro, settings))
        means.add_sums(_critic_step(critic, part, num_tokens, settings))


def _actor_step(
    actor: TrainedPolicy, part: PPOBatch, num_tokens: Tensor, num_macro: Tensor, settings: UpdateSettings
) -> dict[str, Tensor]:
    """One micro-batch of the actor; returns its share of the update's statistics."""
    rollout, mask = part.trajectory.rollout, part.response_mask
    new_logprobs, entropy = actor(rollout.input_ids, rollout.attention_mask, mask.shape[1], settings.temperature)
    logprobs, weights, count = part.trajectory.logprobs, None, num_tokens
    advantages, drawn = part.advantages, part.trajectory.drawn_logprobs
    if settings.rollout_is_clip is not None and drawn is not None:
        advantages = advantages * importance_weights(logprobs, drawn, settings.rollout_is_clip)
    if settings.policy_ratio != "token":
        mean = settings.policy_ratio == "macro_mean"
        new_logprobs = macro_logprobs(new_logprobs, part.macro, mean)
        logprobs = macro_logprobs(logprobs, part.macro, mean)
        if not mean:
            weights, count = token_weights(part.macro), num_macro
    loss, stats = policy_loss(new_logprobs, logprobs, advantages, mask, settings.cliprange, count, weights)
    actor.backward(loss)
    actor.step()
    return {
        "loss/policy": loss,
        "policy/approxkl": stats["approxkl"],
        "policy/clipfrac": stats["clipfrac"],
        "policy/entropy": masked_sum(entropy, mask) / num_tokens,
        "val/ratio": stats["ratio"],
    }


def _critic_step(
    critic: TrainedScalar, part: PPOBatch, num_tokens: Tensor, settings: UpdateSettings
) -> dict[str, Tensor]:
    """One micro-batch of the critic; returns its share of the update's statistics."""
    rollout, mask = part.trajectory.rollout, part.response_mask
    new_values = response_values(critic(rollout.input_ids, rollout.attention_mask), mask.shape[1])
    loss, stats = value_loss(
        new_values, part.trajectory.values, part.returns, mask, settings.cliprange_value, num_tokens
    )
    critic.backward(loss)
    critic.step()
    return {"loss/value": loss, "val/clipfrac": stats["clipfrac"]}
