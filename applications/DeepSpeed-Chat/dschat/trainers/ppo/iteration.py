# SPDX-License-Identifier: Apache-2.0
"""A rollout in use: what it gave, and how far the updates on it are. It can be written down and taken up again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TypeVar, get_type_hints

from torch import Tensor

from dschat.rl.types import PPOBatch, tensors_of
from dschat.run.distributed import device
from dschat.run.metrics import Means
from dschat.run.state import Json
from dschat.trainers.ppo.late_credit import PendingBatch
from dschat.trainers.ppo.update import UpdateProgress

T = TypeVar("T")


@dataclass(frozen=True)
class Iteration:
    """One PPO iteration from its rollout to its last update.

    Attributes:
        batch: this rank's rows.
        metrics: of the rollout, those that are known.
        updates: how many updates are done, and what was measured in them.
    """

    batch: PPOBatch | PendingBatch
    metrics: dict[str, float]
    updates: UpdateProgress = field(default_factory=UpdateProgress)

    def state(self) -> tuple[Json, dict[str, Tensor]]:
        """Plain numbers and tensors from which `from_state` makes the same object."""
        sums, tensors = self.updates.means.state()
        numbers = {
            "metrics": dict(self.metrics),
            "done": self.updates.done,
            "skipped": dict(self.updates.skipped),
            "sums": dict(sums),
        }
        return numbers, tensors_of(self.batch, "batch") | {f"means.{name}": x for name, x in tensors.items()}

    @classmethod
    def from_state(cls, numbers: Json, tensors: Mapping[str, Tensor]) -> Iteration:
        """What `state` gave, on this process's device."""
        sums = {name.removeprefix("means."): x for name, x in tensors.items() if name.startswith("means.")}
        means = Means.from_state(numbers["sums"], sums)
        updates = UpdateProgress(numbers["done"], means, Counter(numbers["skipped"]))
        batch: PPOBatch | PendingBatch
        if any(name.startswith("batch.scored.") for name in tensors):
            batch = put_together(PendingBatch, tensors, "batch")
        else:
            batch = put_together(PPOBatch, tensors, "batch")
        return cls(batch, dict(numbers["metrics"]), updates)


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
