# SPDX-License-Identifier: Apache-2.0
"""The order in which examples are visited, and which of them make up a batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dschat.base.errors import UserError


def update_batches(
    lengths: Sequence[int],
    update_size: int,
    micro_size: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    balance_tokens: bool = False,
) -> list[list[list[int]]]:
    """The updates of one epoch: each is a list of micro-batches, and a micro-batch is a list of example indices.

    The examples of an update depend only on the seed and the epoch, never on `micro_size` or `world_size`. Within an
    update, examples of similar length share a micro-batch, or with `balance_tokens` examples of all lengths. Examples
    that do not fill an update are left for another epoch.

    Args:
        lengths: lengths of the examples, in tokens.
        update_size: examples per update on all ranks together; a multiple of `world_size`.
        micro_size: examples per forward pass of one rank; the last micro-batch of an update may hold fewer.
        seed: seed of the order, 0 to 2**32 - 1.
        epoch: number of the epoch, which changes the order.
        rank: this process.
        world_size: number of processes; each gets an equal share of every update, without overlap.
        balance_tokens: give all micro-batches of an update about the same number of tokens, for packed examples.

    Raises:
        UserError: fewer examples than one update needs.
        ValueError: `update_size` is not a multiple of `world_size`.
    """
    if update_size % world_size:
        raise ValueError(f"update_size {update_size} is not a multiple of world_size {world_size}")
    if len(lengths) < update_size:
        raise UserError(
            f"{len(lengths)} examples are left, fewer than the {update_size} of one update: give more rows "
            "(--data_path, --data_split) or smaller batches."
        )
    order = np.arange(len(lengths))
    np.random.RandomState([seed, epoch]).shuffle(order)
    updates = []
    for start in range(0, len(order) - update_size + 1, update_size):
        indices = order[start : start + update_size].tolist()
        by_length = sorted(indices, key=lambda index: lengths[index])
        local_indices = by_length[rank::world_size]
        if balance_tokens:
            num_batches = math.ceil(len(local_indices) / micro_size)
            updates.append([local_indices[first::num_batches] for first in range(num_batches)])
        else:
            updates.append(_chunks(local_indices, micro_size))
    return updates


def further_examples(count: int, taken: Collection[int], size: int, seed: int, part: int) -> list[int]:
    """Indices of additional examples for an update of all ranks together: one part of a shuffled order.

    Args:
        count: number of all examples.
        taken: indices of the examples that the update has already; they come last in the order.
        size: examples of a part.
        seed: seed of the order.
        part: number of the part; after its end the order begins again.
    """
    shuffled = np.random.RandomState(seed).permutation(count).tolist()
    order = sorted(shuffled, key=set(taken).__contains__)
    positions = range(part * size, (part + 1) * size)
    return [order[position % count] for position in positions]


def eval_batches(lengths: Sequence[int], batch_size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Indices of all examples, shortest first, in batches that are shared by the ranks; the last may hold fewer.

    Every rank gets the same number of batches: if the examples do not suffice, a rank's last batch is empty.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batches = _chunks(order[rank::world_size], batch_size)
    batches_of_first_rank = _chunks(order[::world_size], batch_size)
    while len(batches) < len(batches_of_first_rank):
        batches.append([])
    return batches


def _chunks(indices: list[int], size: int) -> list[list[int]]:
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def pad(sequences: Sequence[Sequence[int]], pad_id: int, side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask ``(B, T)`` of sequences of different lengths, padded on one side to the longest."""
    ids = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    mask = [torch.ones_like(sequence, dtype=torch.bool) for sequence in ids]
    return pad_sequence(ids, True, pad_id, side), pad_sequence(mask, True, False, side)
