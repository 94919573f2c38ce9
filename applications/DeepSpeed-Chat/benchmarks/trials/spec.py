# SPDX-License-Identifier: Apache-2.0
"""Everything that decides a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

BATCH = 64  # prompts of a rollout


@dataclass(frozen=True)
class Spec:
    """One run; equal specs give equal curves."""

    task: str
    seed: int
    critic: str = "fresh"  # what it starts from: the SFT model with a zero head, a `regressed` one, the `reward` model
    scores: str = "gold"  # or of the `reward` model
    critic_rate: float = 1e-3
    estimator: str = "product"  # or a name in `trials.estimators`
    condition: str = "product"  # or a name in `trials.conditions`
    updates: int = 100  # PPO iterations, of one optimiser update each unless flags say otherwise
    flags: tuple[tuple[str, Any], ...] = ()  # of step 3, in order

    @property
    def key(self) -> str:
        """Short, and the same for equal specs alone."""
        usual = asdict(Spec("", -1))
        own = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def cost(self) -> int:
        """Sampled tokens per prompt, to which its seconds are roughly in proportion."""
        return self.updates * int(self.task.rpartition("-")[2])
