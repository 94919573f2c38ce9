# SPDX-License-Identifier: Apache-2.0
"""The optimiser updates of one PPO iteration: PPO epochs × updates × micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dschat.config.batches import BatchPlan
from dschat.config.ppo import PPOConfig
from dschat.errors import UserError
from dschat.models.engines import Trained, TrainedPolicy, TrainedScalar
from dschat.models.layout import Integers, Layout, Lengths, group_by_length, lay_out
from dschat.rl.importance import importance_weights
from dschat.rl.losses import policy_loss, value_loss
from dschat.rl.macro_actions import macro_logprobs, token_weights
from dschat.rl.types import PPOBatch, select_rows, trim
from dschat.run.distributed import sum_over_ranks
from dschat.run.metrics import Means
from dschat.run.stop import raise_if_stopped
from dschat.trainers.checks import COUNTED
from dschat.trainers.ppo.late_credit import LateCredit


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
    vf_coef: float = 1.0  # multiplies the critic's loss

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
            vf_coef=config.vf_coef,
        )


@dataclass
class UpdateProgress:
    """How far the updates of an iteration are: how many are done, and what was measured in them."""

    done: int = 0
    means: Means = field(default_factory=Means)
    skipped: Counter[str] = field(default_factory=Counter)  # by metric


def ppo_update(
    actor: TrainedPolicy,
    critic: TrainedScalar | None,
    batch: PPOBatch | LateCredit,
    settings: UpdateSettings,
    seed: int,
    progress: UpdateProgress | None = None,
    left_out: Callable[[int, Tensor], bool] = lambda done, rows: False,
) -> dict[str, float]:
    """Trains the actor and, where there is one, the critic on one rollout.

    Rows are shuffled into updates; inside an update micro-batches hold rows of similar length. Every loss is divided
    by the count of the whole update over all ranks, so that neither the micro-batch size nor the order matters.

    Args:
        actor: engine of a PolicyModel, in training mode.
        critic: engine of a ScalarModel, in training mode; None where the batch has no values and returns.
        batch: this rank's rows; a LateCredit only where they make one update, for a critic.
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
    known = batch if isinstance(batch, PPOBatch) else batch.pending
    lengths = Lengths.of(known.rollout)
    count = len(lengths.totals)
    shuffle = np.random.RandomState(seed % 2**32)
    progress = progress or UpdateProgress()
    orders = [shuffle.permutation(count) for _ in range(settings.ppo_epochs)]
    starts = range(0, count, settings.update_size)
    updates = [order[start : start + settings.update_size] for order in orders for start in starts]
    for rows in updates[progress.done :]:
        means = progress.means.copy()  # an update that is stopped half-way leaves nothing behind
        _one_update(actor, critic, batch, rows, lengths, settings, means)
        if left_out(progress.done, torch.as_tensor(rows, device=known.response_mask.device)):
            progress.skipped[COUNTED] += 1
        else:
            _note_norms({"actor": actor} | ({} if critic is None else {"critic": critic}), means, progress.skipped)
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


def _note_norms(engines: Mapping[str, Trained], means: Means, skipped: Counter[str]) -> None:
    for name, engine in engines.items():
        if engine.skipped:
            skipped[f"skipped/{name}"] += 1
        else:
            means.add(f"grad_norm/{name}", engine.grad_norm)


def _one_update(
    actor: TrainedPolicy,
    critic: TrainedScalar | None,
    batch: PPOBatch | LateCredit,
    rows: Integers,
    lengths: Lengths,
    settings: UpdateSettings,
    means: Means,
) -> None:
    """One optimiser update of each model; adds its statistics to ``means``."""
    known = batch if isinstance(batch, PPOBatch) else batch.pending
    device = known.response_mask.device
    num_macro = known.macro.mask.sum(1)[torch.as_tensor(rows, device=device)].sum()
    own = torch.stack([torch.as_tensor(lengths.responses[rows].sum(), device=device), num_macro]).float()
    num_tokens, num_macro = sum_over_ranks(own).clamp(min=1).unbind()
    for group in group_by_length(lengths.totals[rows], settings.micro_batch):
        raise_if_stopped()
        chosen = lay_out(known.rollout, rows[group], lengths)
        new_values = None
        new_logprobs, entropy = _logprobs(actor, chosen, settings.temperature)
        if isinstance(batch, PPOBatch):
            part = trim(select_rows(batch, chosen.rows), chosen.width)
        else:
            assert critic is not None  # credit would not be late
            new_values = _values(critic, chosen)
            part = batch.part(chosen, new_logprobs, new_values)
        means.add_sums(_actor_step(actor, part, new_logprobs, num_tokens, num_macro, settings))
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
    num_tokens: Tensor,
    num_macro: Tensor,
    settings: UpdateSettings,
) -> dict[str, Tensor]:
    """One micro-batch of the actor; returns its share of the update's statistics."""
    logprobs, weights, count = part.trajectory.logprobs, None, num_tokens
    advantages, drawn = part.advantages, part.rollout.drawn_logprobs
    if settings.rollout_is_clip is not None and drawn is not None:
        advantages = advantages * importance_weights(logprobs, drawn, settings.rollout_is_clip)
    if settings.policy_ratio != "token":
        mean = settings.policy_ratio == "macro_mean"
        new_logprobs = macro_logprobs(new_logprobs, part.macro, mean)
        logprobs = macro_logprobs(logprobs, part.macro, mean)
        if not mean:
            weights, count = token_weights(part.macro), num_macro
    mask = part.response_mask
    loss, stats = policy_loss(new_logprobs, logprobs, advantages, mask, settings.cliprange, count, weights)
    actor.backward(loss)
    actor.step()
    return {
        "loss/policy": loss,
        "policy/approxkl": stats["approxkl"],
        "policy/clipfrac": stats["clipfrac"],
        "val/ratio": stats["ratio"],
    }


def _critic_step(
    critic: TrainedScalar, part: PPOBatch, new_values: Tensor, num_tokens: Tensor, settings: UpdateSettings
) -> dict[str, Tensor]:
    """One micro-batch of the critic; returns its share of the update's statistics."""
    values, returns, mask = part.trajectory.values, part.returns, part.response_mask
    assert values is not None and returns is not None  # of a critic
    loss, stats = value_loss(new_values, values, returns, mask, settings.cliprange_value, num_tokens)
    critic.backward(settings.vf_coef * loss)
    critic.step()
    return {"loss/value": loss, "val/clipfrac": stats["clipfrac"]}


def total_updates(num_prompts: int, config: PPOConfig, plan: BatchPlan) -> int:
    """Optimiser updates of the whole run: an incomplete last rollout is dropped in every epoch.

    Raises:
        UserError: fewer prompts than one rollout.
    """
    rollouts = num_prompts // plan.global_rollout
    if rollouts == 0:
        raise UserError(
            f"--data_path: {num_prompts} prompts are fewer than one rollout of {plan.global_rollout}. Lower "
            "--per_device_generation_batch_size or --generation_batches, or give more data (--data_split) or, where "
            "prompts were too long, a larger --max_prompt_seq_len."
        )
    return rollouts * plan.updates_per_rollout * config.num_train_epochs
