# SPDX-License-Identifier: Apache-2.0
"""A round in use: its pairs, and how far the updates on them are. It can be written down and taken up again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from dschat.rl.refuel import PairBatch
from dschat.rl.types import tensors_of
from dschat.run.metrics import Means
from dschat.run.state import Json
from dschat.trainers.ppo.iteration import put_together
from dschat.trainers.ppo.update import UpdateProgress


@dataclass(frozen=True)
class Round:
    """One round from its dialogues to its last update.

    Attributes:
        batch: this rank's pairs.
        metrics: of the dialogues.
        updates: how many updates are done, and what was measured in them.
    """

    batch: PairBatch
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
    def from_state(cls, numbers: Json, tensors: Mapping[str, Tensor]) -> Round:
        """What `state` gave, on this process's device."""
        sums = {name.removeprefix("means."): x for name, x in tensors.items() if name.startswith("means.")}
        means = Means.from_state(numbers["sums"], sums)
        updates = UpdateProgress(numbers["done"], means, Counter(numbers["skipped"]))
        return cls(put_together(PairBatch, tensors, "batch"), dict(numbers["metrics"]), updates)
