# SPDX-License-Identifier: Apache-2.0
"""Masked sums, the last position of a mask, and whitening.

A mask is True on what counts; values off the mask may be anything, NaN included.
"""

import torch
from torch import Tensor

Totals = tuple[Tensor, Tensor, Tensor]


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``x`` over the True entries of ``mask`` (same shape); 0-d, 0 for an empty mask."""
    return torch.where(mask, x, torch.zeros_like(x)).sum()


def last_true(mask: Tensor) -> Tensor:
    """(B, T) bool → (B, T) bool: True on the last position of each run of True alone."""
    following = torch.zeros_like(mask)
    following[:, :-1] = mask[:, 1:]
    return mask & ~following


def masked_moments(x: Tensor, mask: Tensor) -> Totals:
    """Totals from which mean and variance follow, to be added up over batches and ranks.

    Args:
        x: any shape.
        mask: bool, the same shape.

    Returns:
        (count, sum, sum of squares) over the True entries, each a 0-d float64 tensor.
    """
    kept = torch.where(mask, x, torch.zeros_like(x)).double()
    return mask.sum().double(), kept.sum(), kept.square().sum()


def whiten(x: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """Shifts and scales ``x`` to mean 0 and variance 1 under the given totals.

    Args:
        x: (B, R) float.
        mask: (B, R) bool.
        totals: (count, sum, sum of squares), as from :func:`masked_moments`, over everything whitened together.

    Returns:
        (B, R), zero off the mask. The variance is the biased one (divided by the count).
    """
    count, total, total_squares = totals
    count = count.clamp(min=1)
    mean = total / count
    variance = (total_squares / count - mean.square()).clamp(min=0)
    whitened = (x.double() - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask, whitened.to(x.dtype), torch.zeros_like(x))


def whiten_rows(x: Tensor, mask: Tensor) -> Tensor:
    """Shifts and scales each row of ``x`` to mean 0 and (biased) variance 1 over its own True entries.

    Example: 1, 3 → −1, 1. A row of equal numbers, or of a single one, becomes 0.

    Args:
        x: (B, R) float.
        mask: (B, R) bool.

    Returns:
        (B, R), zero off the mask.
    """
    count = mask.sum(1, keepdim=True).clamp(min=1)
    kept = torch.where(mask, x, torch.zeros_like(x)).double()
    centred = torch.where(mask, kept - kept.sum(1, keepdim=True) / count, 0.0)
    variance = centred.square().sum(1, keepdim=True) / count
    return (centred / (variance + 1e-8).sqrt()).to(x.dtype)
