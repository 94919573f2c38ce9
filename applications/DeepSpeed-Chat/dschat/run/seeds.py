# SPDX-License-Identifier: Apache-2.0
"""Seeds made from the run's seed, what they are for, and when they are used."""

from enum import IntEnum

import numpy as np


class SeedKind(IntEnum):
    """What a seed is for; each kind draws numbers of its own."""

    TRAINING = 0
    EVALUATION = 1
    SHUFFLE = 2
    SELF_CHECK = 3


def derive_seed(*parts: int) -> int:
    """A 32-bit seed that depends on all parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
