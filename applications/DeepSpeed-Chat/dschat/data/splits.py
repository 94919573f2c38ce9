# SPDX-License-Identifier: Apache-2.0
"""Which rows of a source each training step reads.

The rule is DeepSpeed-Chat's, index for index, so that runs are comparable with published ones:

    index_k = index_{k-1} + int(round(fraction_k * N));  every index_k, k >= 1, then loses index_last - N
    order   = RandomState(seed).shuffle(arange(N, uint32));  part k = order[index_k : index_{k+1}]
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from dschat.errors import UserError

STEPS = ("SFT", "reward model", "PPO")
TRAIN_EVAL_SPLIT = "95,5"  # of a source without evaluation rows

T = TypeVar("T")


def split_indices(num_rows: int, data_split: str, part: int, seed: int | None) -> np.ndarray:
    """Rows of one part of a split, in shuffled order: uint32 numbers (n,) from 0 to `num_rows` - 1.

    The parts of one split are disjoint and together hold every row.

    Args:
        num_rows: N, the rows of the source.
        data_split: comma-separated fractions, normalised to a sum of 1, for instance "2,4,4".
        part: number of the part; in training 0 = SFT, 1 = reward model, 2 = PPO.
        seed: seed of the shuffle, 0 to 2**32 - 1; None = rows stay in their order.

    Raises:
        UserError: `data_split` is no list of fractions, or has no part number `part`.
    """
    fractions = parse_fractions(data_split)
    if not 0 <= part < len(fractions):
        needed = f"the {STEPS[part]} step" if 0 <= part < len(STEPS) else f"part {part}"
        raise UserError(
            f"--data_split {data_split} has {len(fractions)} parts, none for {needed}: give three, like 2,4,4."
        )
    bounds = split_bounds(num_rows, fractions)
    order = np.arange(num_rows, dtype=np.uint32)
    if seed is not None:
        np.random.RandomState(seed).shuffle(order)
    return order[bounds[part] : bounds[part + 1]]


def split_part(rows: Sequence[T], data_split: str, part: int, seed: int | None) -> list[T]:
    """The rows of one part of a split, in shuffled order; see `split_indices`."""
    return [rows[i] for i in split_indices(len(rows), data_split, part, seed)]


def split_bounds(num_rows: int, fractions: list[float]) -> list[int]:
    """Where K parts begin and end in the shuffled order: K + 1 ascending positions from 0 to N.

    In tiny sources the correction could push one below 0; it stays at 0. The sum of the fractions must be above 0.
    """
    total = sum(fractions)
    bounds = [0]
    for fraction in fractions:
        bounds.append(bounds[-1] + int(round(fraction / total * float(num_rows))))
    excess = bounds[-1] - num_rows
    return [0] + [max(0, bound - excess) for bound in bounds[1:]]


def parse_fractions(data_split: str) -> list[float]:
    """The numbers of a `--data_split`; raises UserError."""
    try:
        fractions = [float(part) for part in data_split.split(",")]
    except ValueError:
        fractions = []
    if not all(math.isfinite(part) and part >= 0 for part in fractions) or sum(fractions) <= 0:
        raise UserError(f"--data_split {data_split} is no list of fractions: give numbers of at least 0, like 2,4,4.")
    return fractions
