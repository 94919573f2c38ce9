# SPDX-License-Identifier: Apache-2.0
"""The global random states of a process, as tensors. What the run itself draws has seeds of its own."""

import random

import numpy as np
import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """Of Python, NumPy, torch on the CPU and torch on each GPU."""
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
