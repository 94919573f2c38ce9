# SPDX-License-Identifier: Apache-2.0
"""What a trainer must know to go on where it was, beside models and optimisers."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Json = dict[str, Any]  # type: ignore[explicit-any]  # an object that JSON can hold


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        update: optimiser updates so far.
        numbers: counters and coefficients, the same on every rank.
        random: the global random states of this rank, see `dschat.run.random_states`.
        tensors: of this rank: a rollout that is in use, and sums over it.
    """

    update: int
    numbers: Json
    random: dict[str, Tensor]
    tensors: dict[str, Tensor] = field(default_factory=dict)
