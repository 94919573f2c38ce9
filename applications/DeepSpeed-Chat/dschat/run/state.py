# SPDX-License-Identifier: Apache-2.0
"""What a run must know to go on where it was: counters, random states, and the seeds of what it draws itself."""

import random
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

Json = dict[str, Any]  # type: ignore[explicit-any]  # an object that JSON can hold


@dataclass(frozen=True)
class Progress:
    """Where a run is, or an algorithm inside an iteration, beside models and optimisers."""

    update: int  # optimiser updates so far; an algorithm's are those of the iteration that is under way
    numbers: Json  # counters and coefficients, the same on every rank
    # The global random states of this rank, see `random_states`; of an algorithm between two iterations none.
    random: dict[str, Tensor]
    # Of this rank: a rollout that is in use, and sums over it.
    tensors: dict[str, Tensor] = field(default_factory=dict)


def random_states() -> dict[str, Tensor]:
    """The global random states of Python, NumPy, torch on the CPU and torch on each GPU."""
    version, words, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    states = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*numpy["state"]["key"].tolist(), numpy["state"]["pos"], numpy["has_gauss"]]),
        "numpy_gauss": torch.tensor([numpy["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return states | {f"cuda{number}": state for number, state in enumerate(gpus)}


def set_random_states(states: dict[str, Tensor]) -> None:
    """Sets what `random_states` gave; a GPU that is not there is passed over."""
    version, *words = states["python"].tolist()
    random.setstate((version, tuple(words), next(iter(states["python_gauss"].tolist()), None)))
    *keys, position, has_gauss = states["numpy"].tolist()
    gauss = states["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda{number}" in states:
            torch.cuda.set_rng_state(states[f"cuda{number}"], number)


class SeedKind(IntEnum):
    """What a seed is for; each kind draws numbers of its own."""

    TRAINING = 0
    EVALUATION = 1
    SHUFFLE = 2
    SELF_CHECK = 3
    COMPLETION = 4
    REFILL = 5
    HEAD = 6


def derive_seed(*parts: int) -> int:
    """A 32-bit seed that depends on all parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
