# SPDX-License-Identifier: Apache-2.0
"""What algorithms share in an iteration: its state in checkpoints, its optimiser steps, micro-batches and times.

`Iteration` is a rollout whose optimiser steps are under way. `run_updates` makes those that are left and keeps
`UpdateProgress`; `state_with` puts both into the state of a checkpoint, and `Iteration.from_state` takes them out.
"""

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

MEANS = "means."  # before the names of the tensors of `Means` in a state


# ---- Its state ----


@dataclass
class UpdateProgress:
    """How far the optimiser steps of an iteration are.

    Attributes:
        steps: steps that are done, each of one or several engines.
        means: statistics of these steps.
        skipped: how many of them were left out, by metric.
        updates: what they are in the run's count of updates; fewer where engines have steps of their own.
    """

    steps: int = 0
    means: Means = field(default_factory=Means)
    skipped: Counter[str] = field(default_factory=Counter)
    updates: int = 0


@dataclass(frozen=True)
class Iteration(Generic[Batch]):
    """An iteration between its rollout and its last update."""

    batch: Batch  # this rank's rows
    metrics: Metrics  # metrics of the rollout
    random: dict[str, Tensor]  # the global random states after the rollout
    progress: UpdateProgress = field(default_factory=UpdateProgress)

    @classmethod
    def from_state(cls, state: Progress, batch_type: type[Batch]) -> Iteration[Batch]:
        """The iteration that `state_with` put into a state, on this process's device."""
        numbers = state.rollout["current"]
        sums = {}
        for name, tensor in state.tensors.items():
            if name.startswith(MEANS):
                sums[name.removeprefix(MEANS)] = tensor
        means = Means.from_state(numbers["sums"], sums)
        progress = UpdateProgress(numbers["done"], means, Counter(numbers["skipped"]), numbers["updates"])
        batch = from_tensors(batch_type, state.tensors, "batch")
        return cls(batch, dict(numbers["metrics"]), state.random, progress)


def state_with(numbers: Json, current: Iteration[Batch] | None) -> Progress:
    """The state of an algorithm: numbers from before the current iteration and, inside one, that iteration."""
    if current is None:
        return Progress(0, numbers, {})
    progress = current.progress
    sums, sum_tensors = progress.means.state()
    current_numbers = {
        "metrics": dict(current.metrics),
        "done": progress.steps,
        "updates": progress.updates,
        "skipped": dict(progress.skipped),
        "sums": dict(sums),
    }
    tensors = tensors_of(current.batch, "batch")
    for name, tensor in sum_tensors.items():
        tensors[MEANS + name] = tensor
    return Progress(progress.updates, numbers, current.random, tensors, {"current": current_numbers})


def from_tensors(cls: type[T], tensors: Mapping[str, Tensor], name: str) -> T:
    """The dataclass whose tensors `macro_actions.types.tensors_of` named below `name`, on this process's device."""
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    for attribute in fields(cls):  # type: ignore[arg-type]
        path = f"{name}.{attribute.name}"
        if is_dataclass(hints[attribute.name]):
            values[attribute.name] = from_tensors(hints[attribute.name], tensors, path)
        elif path in tensors or hints[attribute.name] is Tensor:
            values[attribute.name] = tensors[path].to(device())
        else:  # of type Tensor | None
            values[attribute.name] = None
    return cls(**values)


# ---- Its passes ----


def on_device(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a batch on this process's device."""
    return {name: tensor.to(device()) for name, tensor in batch.items()}


def pass_size(plan: BatchPlan) -> PassSize:
    """Maximum size of a forward and backward pass in training."""
    return PassSize(plan.micro_batch, plan.max_tokens)


def eval_size(config: CommonConfig) -> PassSize:
    """Maximum size of a forward pass without gradients, from --per_device_eval_batch_size."""
    size = PassSize(config.output.per_device_eval_batch_size, config.optimisation.max_tokens_per_micro_batch)
    return replace(size.without_gradient, rows=size.rows)


def micro_batches(lengths: Integers, size: PassSize, engines: Iterable[Trained]) -> list[Integers]:
    """Row numbers of each micro-batch of an update; there are as many micro-batches on every rank.

    Their number differs between updates if a limit of tokens cuts them; the engines are then told.

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


# ---- Its optimiser steps ----


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
        update: trains on a part, and adds the statistics of this step to the means.
        left_out: called after a step with the number of steps before it and its part. True if numbers were not
            finite: the engines have left the step out, and its statistics do not count.
        engines_of: the engines that a part trains, by name.
        grad_norm: name of the metric of an engine's gradient norm; {} stands for the engine's name.
        updates_after: the run's updates in this iteration after each part; if not given, each part is one update.

    Returns:
        Means over the steps, gradient norms included; skipped/<engine>, steps that fp16 left out, and
        skipped/nonfinite, steps that `left_out` named, each if there are any.
    """
    for part in parts[progress.steps :]:
        means = progress.means.copy()  # a step that is stopped half-way leaves nothing behind
        update(part, means)
        if left_out(progress.steps, part):
            progress.skipped[SKIPPED_NONFINITE] += 1
        else:
            for name, engine in engines_of(part).items():
                if engine.skipped:
                    progress.skipped[f"skipped/{name}"] += 1
                else:
                    means.add(grad_norm.format(name), engine.grad_norm)
            progress.means = means
        progress.steps += 1
        progress.updates = progress.steps if updates_after is None else updates_after[progress.steps - 1]
    return progress.means.reduce() | {name: float(count) for name, count in progress.skipped.items()}


# ---- Its times ----


@dataclass
class Clock:
    """Seconds of the parts of an iteration, and the responses that were sampled meanwhile, for the throughput.

    The device finishes its work before the time is read.
    """

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
