# SPDX-License-Identifier: Apache-2.0
"""An iteration between its rollout and its last update, which checkpoints can hold; and its updates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Generic, TypeVar, get_type_hints

import torch
from torch import Tensor

from dschat.models.engines import Trained
from dschat.models.layout import Integers, Lengths, PassSize, group_by_length
from dschat.run.distributed import device, largest_over_ranks
from dschat.run.metrics import Means
from dschat.run.state import Json, Progress
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.training.nonfinite import SKIPPED_NONFINITE
from macro_actions.types import tensors_of

Metrics = dict[str, float]
T = TypeVar("T")
Batch = TypeVar("Batch")

MEANS = "means."  # before the names of sums in a state


@dataclass
class UpdateProgress:
    """How far the optimiser steps of an iteration are."""

    done: int = 0  # steps; one may train several engines
    means: Means = field(default_factory=Means)  # statistics of these steps
    skipped: Counter[str] = field(default_factory=Counter)  # steps that were left out, by metric
    updates: int = 0  # updates in the run's count; fewer than steps where engines have steps of their own


@dataclass(frozen=True)
class Iteration(Generic[Batch]):
    """An iteration between its rollout and its last update."""

    batch: Batch  # this rank's rows
    metrics: Metrics  # metrics of the rollout
    random: dict[str, Tensor]  # the global random states after the rollout
    updates: UpdateProgress = field(default_factory=UpdateProgress)

    @classmethod
    def from_state(cls, state: Progress, batch_type: type[Batch]) -> Iteration[Batch]:
        """The iteration that `state_with` put into a state, on this process's device."""
        numbers = state.rollout["current"]
        sums = {}
        for name, tensor in state.tensors.items():
            if name.startswith(MEANS):
                sums[name.removeprefix(MEANS)] = tensor
        means = Means.from_state(numbers["sums"], sums)
        updates = UpdateProgress(numbers["done"], means, Counter(numbers["skipped"]), numbers["updates"])
        batch = put_together(batch_type, state.tensors, "batch")
        return cls(batch, dict(numbers["metrics"]), state.random, updates)


def state_with(numbers: Json, current: Iteration[Batch] | None) -> Progress:
    """The state of an algorithm: numbers from before the current iteration and, inside one, that iteration."""
    if current is None:
        return Progress(0, numbers, {})
    updates = current.updates
    sums, sum_tensors = updates.means.state()
    current_numbers = {
        "metrics": dict(current.metrics),
        "done": updates.done,
        "updates": updates.updates,
        "skipped": dict(updates.skipped),
        "sums": dict(sums),
    }
    tensors = tensors_of(current.batch, "batch")
    for name, tensor in sum_tensors.items():
        tensors[MEANS + name] = tensor
    return Progress(updates.updates, numbers, current.random, tensors, {"current": current_numbers})


def put_together(cls: type[T], tensors: Mapping[str, Tensor], name: str) -> T:
    """The dataclass that `macro_actions.types.tensors_of` took apart under this name, on this process's device."""
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        path = f"{name}.{f.name}"
        if is_dataclass(hints[f.name]):
            values[f.name] = put_together(hints[f.name], tensors, path)
        elif hints[f.name] is not Tensor and path not in tensors:  # Tensor | None
            values[f.name] = None
        else:
            values[f.name] = tensors[path].to(device())
    return cls(**values)


def on_device(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a batch, copied to this process's device."""
    return {name: tensor.to(device()) for name, tensor in batch.items()}


def pass_size(plan: BatchPlan) -> PassSize:
    """Maximum size of a forward and backward pass in training."""
    return PassSize(plan.micro_batch, plan.max_tokens)


def eval_size(config: CommonConfig) -> PassSize:
    """Maximum size of a forward pass without gradients, from --per_device_eval_batch_size."""
    size = PassSize(config.output.per_device_eval_batch_size, config.optimisation.max_tokens_per_micro_batch)
    return replace(size.without_gradient, rows=size.rows)


def micro_batches(lengths: Integers, size: PassSize, engines: Iterable[Trained]) -> list[Integers]:
    """Row numbers of an update's micro-batches, as many on every rank.

    Micro-batches that are cut by tokens vary in number, which the engines must know.

    Args:
        lengths: shape ``(n,)``, tokens of each row of the update on this rank; every rank has as many rows.
        size: what a pass may hold.
        engines: the engines that are trained on them.
    """
    groups = group_by_length(lengths, size, largest_over_ranks)
    if size.tokens is not None:
        for engine in engines:
            engine.begin_update(len(groups))
    return groups


def run_updates(
    parts: Sequence[T],
    progress: UpdateProgress,
    update: Callable[[T, Means], None],
    left_out: Callable[[int, T], bool],
    engines_of: Callable[[T], Mapping[str, Trained]],
    grad_norm: str = "grad_norm/{}",
    updates_after: Sequence[int] | None = None,
) -> Metrics:
    """The optimiser steps of an iteration that are left.

    Args:
        parts: what each step trains on.
        progress: steps that are done; it is kept up to date.
        update: trains on a part and adds its shares of each statistic to the means, with the weight of one step.
        left_out: called at the end of a step with the number of steps before it and its part: whether numbers
            were not finite, so that the engines left the step out and its statistics do not count.
        engines_of: the engines that a part trains, by name.
        grad_norm: the metric of an engine's name.
        updates_after: updates of the run's count that are done after each part; each part is one if not given.

    Returns:
        Means over the steps and gradient norms; and, where there are such, skipped/<engine>, the number of steps
        that fp16 left out, and skipped/nonfinite, the number of steps that count for nothing.
    """
    for part in parts[progress.done :]:
        means = progress.means.copy()  # a step that is stopped half-way leaves nothing behind
        update(part, means)
        if left_out(progress.done, part):
            progress.skipped[SKIPPED_NONFINITE] += 1
        else:
            for name, engine in engines_of(part).items():
                if engine.skipped:
                    progress.skipped[f"skipped/{name}"] += 1
                else:
                    means.add(grad_norm.format(name), engine.grad_norm)
            progress.means = means
        progress.done += 1
        progress.updates = progress.done if updates_after is None else updates_after[progress.done - 1]

    metrics = progress.means.reduce()
    for name, count in progress.skipped.items():
        if count:
            metrics[name] = float(count)
    return metrics


@dataclass
class Clock:
    """Seconds of the parts of an iteration, waiting for the device after each; and what was sampled in it."""

    seconds: Metrics = field(default_factory=dict)
    sampled: list[Lengths] = field(default_factory=list)  # lengths of each sampling, in order
    _last: float = field(default_factory=time.perf_counter)

    def record(self, name: str) -> None:
        """Adds the time since the last record to ``time/name``."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        metric = f"time/{name}"
        self.seconds[metric] = self.seconds.get(metric, 0.0) + now - self._last
        self._last = now
