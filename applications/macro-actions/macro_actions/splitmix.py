# SPDX-License-Identifier: Apache-2.0
"""SplitMix64: random 64-bit integers computed from a counter, the same on every device and in every process.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. PyTorch's 64-bit integers
are signed, so every constant is the signed integer with the same bits; additions and products wrap around.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def random_words(seeds: Tensor, count: int) -> Tensor:
    """First ``count`` outputs of the generator with each seed.

    Args:
        seeds: shape ``(B,)``, int64.
        count: number of outputs per seed.

    Returns:
        Shape ``(B, count)``, int64. All 64 bits are random.
    """
    steps = torch.arange(1, count + 1, device=seeds.device)
    return mix(seeds[:, None] + GOLDEN * steps)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of int64 after which similar inputs look unrelated. Any shape."""
    x = (x ^ shift_right(x, 30)) * FIRST_FACTOR
    x = (x ^ shift_right(x, 27)) * SECOND_FACTOR
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64: zeros move in, where PyTorch's own shift would copy the sign bit."""
    low_bits = (1 << (64 - bits)) - 1
    return (x >> bits) & low_bits
