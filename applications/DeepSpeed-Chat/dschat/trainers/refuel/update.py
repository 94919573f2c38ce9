# SPDX-License-Identifier: Apache-2.0
"""The optimiser updates on the pairs of one round: each is a regression on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dschat.config.batches import BatchPlan
from dschat.config.refuel import RefuelOnlineConfig
from dschat.models.engines import TrainedPolicy
from dschat.models.layout import Layout
from dschat.rl.losses import regression_loss
from dschat.rl.refuel import PairBatch
from dschat.run.metrics import Means
from dschat.run.stop import raise_if_stopped
from dschat.trainers.checks import COUNTED
from dschat.trainers.ppo.update import UpdateProgress
from dschat.trainers.refuel.models import pair_layouts, summed_logprobs

# Statistics of the loss → metrics; log-ratios are log π − log π_t of whole replies.
NAMES = {
    "kl": "policy/log_ratio",
    "kl_better": "policy/log_ratio_better",
    "kl_worse": "policy/log_ratio_worse",
    "agreement": "policy/agreement",
    "ratio": "val/ratio",
    "ratio_squared": "val/ratio_variance",  # less the square of the ratio's mean, in the end
}


@dataclass(frozen=True)
class RefuelSettings:
    """What the updates depend on."""

    updates: int  # on one round
    num_pairs: int  # of an update, on all processes
    micro_batch: int  # pairs of one forward pass
    eta: float
    temperature: float

    @classmethod
    def from_config(cls, config: RefuelOnlineConfig, plan: BatchPlan) -> RefuelSettings:
        """What the flags say."""
        return cls(plan.updates_per_rollout, plan.global_batch, plan.micro_batch, config.eta, config.temperature)


def refuel_update(
    policy: TrainedPolicy,
    batch: PairBatch,
    settings: RefuelSettings,
    progress: UpdateProgress,
    left_out: Callable[[int], bool] = lambda done: False,
) -> dict[str, float]:
    """Trains the policy on one round.

    Every update takes all pairs, so that their order is of no matter; micro-batches hold pairs of similar length. The
    loss is divided by the number of pairs of all ranks.

    Args:
        policy: engine of a PolicyModel, in training mode.
        batch: this rank's pairs.
        settings: sizes, η and temperature.
        progress: where an interrupted call stopped; it is kept up to date, update by update.
        left_out: called at the end of each update with the number of those before it. Says whether numbers were not
            finite, so that the policy left the update out and its statistics do not count.

    Raises:
        Stopped: see `dschat.run.stop`.

    Returns:
        Means over the updates: loss/refuel, policy/…, val/… and grad_norm; and, where there are such, skipped/policy,
        the number of updates that fp16 left out, and skipped/nonfinite, that of those that count for nothing.
    """
    layouts = pair_layouts(batch.rollout, settings.micro_batch)
    while progress.done < settings.updates:
        means = progress.means.copy()  # an update that is stopped half-way leaves nothing behind
        _one_update(policy, batch, layouts, settings, means)
        if left_out(progress.done):
            progress.skipped[COUNTED] += 1
        else:
            if policy.skipped:
                progress.skipped["skipped/policy"] += 1
            else:
                means.add("grad_norm", policy.grad_norm)
            progress.means = means
        progress.done += 1
    counted = progress.done - progress.skipped[COUNTED]
    metrics = {
        name: number if name == "grad_norm" else number / counted for name, number in progress.means.reduce().items()
    }
    if "val/ratio_variance" in metrics:
        metrics["val/ratio_variance"] -= metrics["val/ratio"] ** 2
    return metrics | {name: float(count) for name, count in progress.skipped.items() if count}


def _one_update(
    policy: TrainedPolicy, batch: PairBatch, layouts: Sequence[Layout], settings: RefuelSettings, means: Means
) -> None:
    """One optimiser update; adds its statistics to ``means``."""
    for rows in layouts:
        raise_if_stopped()
        log_ratios = summed_logprobs(policy, rows, settings.temperature) - batch.logprobs[rows.rows]
        first, second = log_ratios.chunk(2)
        differences = batch.reward_differences[rows.rows[: len(first)]]
        loss, stats = regression_loss(first, second, differences, settings.eta, settings.num_pairs)
        policy.backward(loss)
        policy.step()
        means.add_sum("loss/refuel", loss)
        means.add_sums({NAMES[name]: number for name, number in stats.items()})
