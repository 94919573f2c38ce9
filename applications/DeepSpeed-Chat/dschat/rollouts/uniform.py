# SPDX-License-Identifier: Apache-2.0
"""Uniform numbers that follow from a seed and a position alone: no state, the same on every device."""

import numpy as np
import torch
from torch import Tensor


def _signed(number: int) -> int:
    """The 64-bit pattern of a non-negative number, read as torch's signed integer."""
    return number - 2**64 if number >= 2**63 else number


# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
STRIDE = _signed(0x9E3779B97F4A7C15)
FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
SECOND_FACTOR = _signed(0x94D049BB133111EB)


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """The first numbers of each seed's sequence.

    Args:
        seeds: (B,) long.
        count: T.

    Returns:
        (B, T) float64 in [0, 1), multiples of 2^-53. Number t of a row is SplitMix64's output t for the row's seed.
    """
    steps = torch.arange(1, count + 1, device=seeds.device)
    state = seeds[:, None] + steps * STRIDE  # integers wrap around
    state = (state ^ _shifted(state, 30)) * FIRST_FACTOR
    state = (state ^ _shifted(state, 27)) * SECOND_FACTOR
    return _shifted(state ^ _shifted(state, 31), 11).double() / 2**53


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x shifted to the right with zeros moving in, as for unsigned numbers."""
    kept: int = 2 ** (64 - bits) - 1
    return (x >> bits) & kept


def row_seed(*parts: int) -> int:
    """A 63-bit seed of one row that depends on all parts, for instance the run's seed, the draw and the prompt."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) >> 1
