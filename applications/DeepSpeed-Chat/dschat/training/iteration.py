# SPDX-License-Identifier: Apache-2.0
"""A rollout in use: what it gave, and how far the updates on it are. It can be written down and taken up again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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


@dataclass
class UpdateProgress:
    """How far the updates of an iteration are: how many are done, and what was measured in them."""

    done: int = 0
    means: Means = field(default_factory=Means)
    skipped: Counter[str] = field(default_factory=Counter)  # by metric


@dataclass(frozen=True)
class Iteration(Generic[Batch]):
    """One iteration from its rollout to its last update."""

    batch: Batch  # this rank's rows
    metrics: Metrics  # of the rollout, those that are known
    random: dict[str, Tensor]  # the global random states after the rollout
    # How many updates are done, and what was measured in them.
    updates: UpdateProgress = field(default_factory=UpdateProgress)

    @classmethod
    def from_state(cls, state: Progress, batch_type: type[Batch]) -> Iteration[Batch]:
        """What `state_with` wrote down, on this process's device."""
        numbers = state.numbers["current"]
        sums = {name.removeprefix("means."): x for name, x in state.tensors.items() if name.startswith("means.")}
        updates = UpdateProgress(numbers["done"], Means.from_state(numbers["sums"], sums), Counter(numbers["skipped"]))
        batch = put_together(batch_type, state.tensors, "batch")
        return cls(batch, dict(numbers["metrics"]), state.random, updates)


def state_with(numbers: Json, current: Iteration[Batch] | None) -> Progress:
    """The state of an algorithm with these numbers, and with the iteration that is under way, if one is."""
    if current is None:
        return Progress(0, numbers, {})
    updates = current.updates
    sums, tensors = updates.means.state()
    of_current = {
        "metrics": dict(current.metrics),
        "done": updates.done,
        "skipped": dict(updates.skipped),
        "sums": dict(sums),
    }
    tensors = tensors_of(current.batch, "batch") | {f"means.{name}": x for name, x in tensors.items()}
    return Progress(updates.done, numbers | {"current": of_current}, current.random, tensors)


def put_together(cls: type[T], tensors: Mapping[str, Tensor], name: str) -> T:
    """The dataclass that `tensors_of` took apart."""
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        path = f"{name}.{f.name}"
        if is_dataclass(hints[f.name]):
            values[f.name] = put_together(hints[f.name], tensors, path)
        else:
            optional = hints[f.name] is not Tensor and path not in tensors
            values[f.name] = None if optional else tensors[path].to(device())
    return cls(**values)


def pass_size(plan: BatchPlan) -> PassSize:
    """Of a forward pass in training."""
    return PassSize(plan.micro_batch, plan.max_tokens)


def eval_size(config: CommonConfig) -> PassSize:
    """Of a forward pass without gradients, of --per_device_eval_batch_size."""
    size = PassSize(config.output.per_device_eval_batch_size, config.optimisation.max_tokens_per_micro_batch)
    return replace(size.without_gradient, rows=size.rows)


def micro_batches(lengths: Integers, size: PassSize, engines: Iterable[Trained]) -> list[Integers]:
    """Row numbers of an update's micro-batches, as many on every rank. By tokens, engines are told how many they are.

    `lengths` (n,) are tokens of each row of the update on this rank; every rank has as many rows.
    """
    groups = group_by_length(lengths, size, largest_over_ranks)
    if size.tokens is not None:
        for engine in engines:
            engine.begin_update(len(groups))
    return groups


def run_updates(
    parts: Iterable[T],
    progress: UpdateProgress,
    update: Callable[[T, Means], None],
    left_out: Callable[[int, T], bool],
    engines: Mapping[str, Trained],
    grad_norm: str = "grad_norm/{}",
) -> Metrics:
    """The optimiser updates of an iteration, one on each part, those that are left after `progress`, which is kept up
    to date.

    `update` adds its shares of each statistic to the means. `left_out` is called at its end with the number of updates
    before it and its part: whether numbers were not finite, so that the engines left it out and its statistics do not
    count. `grad_norm` is the metric of an engine's name.

    Returns means over the updates and gradient norms; and, where there are such, skipped/<engine>, the number of
    updates that fp16 left out, and skipped/nonfinite, that of those that count for nothing.
    """
    for part in list(parts)[progress.done :]:
        means = progress.means.copy()  # an update that is stopped half-way leaves nothing behind
        update(part, means)
        if left_out(progress.done, part):
            progress.skipped[SKIPPED_NONFINITE] += 1
        else:
            for name, engine in engines.items():
                if engine.skipped:
                    progress.skipped[f"skipped/{name}"] += 1
                else:
                    means.add(grad_norm.format(name), engine.grad_norm)
            progress.means = means
        progress.done += 1
    # Every update added its shares of each statistic, so that their sum is divided by the number of updates here. The
    # gradient norms were added as means.
    counted = progress.done - progress.skipped[SKIPPED_NONFINITE]
    metrics = {
        name: number if name.startswith("grad_norm") else number / counted
        for name, number in progress.means.reduce().items()
    }
    return metrics | {name: float(count) for name, count in progress.skipped.items() if count}


@dataclass
class Clock:
    """Seconds of the parts of an iteration, waiting for the device at each border; and what was sampled in it."""

    seconds: Metrics = field(default_factory=dict)
    draws: list[Lengths] = field(default_factory=list)  # of the part generation, one after another
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Books the time since the last lap under ``time/name``."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + now - self._last
        self._last = now
