# SPDX-License-Identifier: Apache-2.0
"""Masked sums and moments, ends of runs and rows in a mask, and whitening.

A mask is True on entries that count. Other entries may hold any number, NaN included.
"""

import torch
from torch import Tensor

Totals = tuple[Tensor, Tensor, Tensor]


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum over the True entries of a mask.

    Args:
        x: any shape.
        mask: bool, shape of ``x``.

    Returns:
        0-d; 0 for an empty mask.
    """
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def last_true(mask: Tensor) -> Tensor:
    """Last position of each run of True. (B, T) bool → (B, T) bool.

    Example: 1 1 0 1 1 1 gives 0 1 0 0 0 1.
    """
    following = torch.zeros_like(mask)
    following[:, :-1] = mask[:, 1:]
    return mask & ~following


def last_of_row(mask: Tensor) -> Tensor:
    """Last True position of each row, whatever holes the row has. (B, T) bool → (B, T) bool.

    Example: 1 1 0 1 1 1 0 gives 0 0 0 0 0 1 0.
    """
    remaining_count = mask.flip(1).cumsum(1).flip(1)  # True entries from this column on
    return mask & (remaining_count == 1)


def widths(mask: Tensor) -> Tensor:
    """Columns of each row up to its last True position, holes included. (B, T) bool → (B,) int64.

    Example: 1 1 0 1 0 gives 4; a row without True gives 0.
    """
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    numbers = torch.where(mask, columns, 0)
    return numbers.amax(1) if mask.shape[1] else numbers.sum(1)


def masked_moments(x: Tensor, mask: Tensor) -> Totals:
    """Totals that determine mean and variance, and that can be added up over batches and ranks.

    Args:
        x: any shape.
        mask: bool, shape of ``x``.

    Returns:
        Count, sum and sum of squares over the True entries, each 0-d float64.
    """
    values = torch.where(mask, x.double(), 0.0)
    count = mask.sum().double()
    return count, values.sum(), values.square().sum()


def whiten(x: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Shift and scale ``x`` to mean 0 and variance 1 under the given totals.

    Args:
        x: shape ``(B, R)``.
        mask: shape ``(B, R)``, bool.
        totals: from :func:`masked_moments`, over everything that is whitened together.

    Returns:
        Shape ``(B, R)``, 0 where the mask is False. The variance is biased: divided by the count.
    """
    count, total, total_squares = totals
    count = count.clamp(min=1)
    mean = total / count
    variance = (total_squares / count - mean.square()).clamp(min=0)
    whitened = (x.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened.to(x.dtype), 0.0)


def whiten_rows(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale each row to mean 0 and biased variance 1 over its own True entries.

    Example: 1 3 gives −1 1. Equal numbers, or a single one, give 0.

    Args:
        x: shape ``(B, R)``.
        mask: shape ``(B, R)``, bool.

    Returns:
        Shape ``(B, R)``, 0 where the mask is False.
    """
    count = mask.sum(1, keepdim=True).clamp(min=1)
    values = torch.where(mask, x.double(), 0.0)
    mean = values.sum(1, keepdim=True) / count
    centred = torch.where(mask, values - mean, 0.0)
    variance = centred.square().sum(1, keepdim=True) / count
    deviation = (variance + 1e-8).sqrt()
    return (centred / deviation).to(x.dtype)
