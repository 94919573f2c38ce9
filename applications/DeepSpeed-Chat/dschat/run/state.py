# SPDX-License-Identifier: Apache-2.0
"""The state of a run that a checkpoint stores: counters and random states; and seeds of separate random streams."""

import random
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

Json = dict[str, Any]  # type: ignore[explicit-any]  # a JSON object


@dataclass(frozen=True)
class Progress:
    """The state of a run, or of an algorithm inside an iteration, apart from models and optimisers."""

    update: int  # optimiser updates so far; an algorithm's are those of the current iteration
    # Counters and coefficients, the same on every rank. Inside an iteration they are those from before it.
    numbers: Json
    # This rank's global random states, see `random_states`; empty for an algorithm between two iterations.
    random: dict[str, Tensor]
    # Rollouts that are sampled already: this rank's rows and sums over them, and numbers, the same on every rank.
    # Another number of ranks, which has other prompts each, does without and samples again.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rollout: Json = field(default_factory=dict)

    @property
    def is_inside_rollout(self) -> bool:
        """Whether optimisers have made some of their steps on a rollout, and others are left."""
        return has_steps(self.rollout)

    def equals_but_for_tensors(self, other: "Progress") -> bool:
        """Whether two states of one run are the same: tensors change only together with numbers."""
        mine = (self.update, self.numbers, self.rollout)
        return mine == (other.update, other.numbers, other.rollout)


def has_steps(rollout: Json) -> bool:
    """Whether optimisers have made steps on the rollout of `Progress.rollout`."""
    return "current" in rollout and rollout["current"]["done"] > 0


def random_states() -> dict[str, Tensor]:
    """The global random states of Python, NumPy, torch on the CPU and torch on each GPU."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    generator = numpy_state["state"]
    states = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*generator["key"].tolist(), generator["pos"], numpy_state["has_gauss"]]),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    for number in range(torch.cuda.device_count()):
        states[f"cuda{number}"] = torch.cuda.get_rng_state(number)
    return states


def set_random_states(states: dict[str, Tensor]) -> None:
    """Restores the states of `random_states`; those of missing GPUs are ignored."""
    version, *words = states["python"].tolist()
    python_gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), python_gauss[0] if python_gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    gauss = states["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    for number in range(torch.cuda.device_count()):
        if f"cuda{number}" in states:
            torch.cuda.set_rng_state(states[f"cuda{number}"], number)


class SeedKind(IntEnum):
    """The purpose of a seed; each has its own random stream."""

    TRAINING = 0
    EVALUATION = 1
    SHUFFLE = 2
    SELF_CHECK = 3
    COMPLETION = 4
    REFILL = 5
    HEAD = 6


def derive_seed(*parts: int) -> int:
    """A 32-bit seed that depends on every part."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
