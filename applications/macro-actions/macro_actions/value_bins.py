# SPDX-License-Identifier: Apache-2.0
"""Values of bounded returns as distributions over bins, learnt by cross-entropy (HL-Gauss, Farebrother et al. 2024).

A value head has K outputs, one for each of K bins of equal width between two bounds. The target of a return is the
mass of a Gaussian around it in each bin; the value is the expectation of the centres of the bins. arXiv 2608.02181
trains an RLHF critic this way, with 101 bins on [−0.1, 1.1] and σ = 0.024 for returns in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from macro_actions.losses import Count, Stats, token_count


@dataclass(frozen=True)
class ValueBins:
    """Bins of equal width.

    Near a bound the Gaussian is cut off, and the value is drawn inwards: leave 4 σ around the returns, as [−0.1, 1.1]
    does around [0, 1].

    Attributes:
        low: lower bound of the first bin.
        high: upper bound of the last one.
        count: K.
        sigma: σ of the target's Gaussian; about twice the width of a bin.

    Raises:
        ValueError: the bounds are not finite, or the lower one is not below the other; ``count`` is below 2; ``sigma``
            is not positive.
    """

    low: float
    high: float
    count: int
    sigma: float

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"bins need finite bounds, the lower one first, not {self.low} and {self.high}.")
        if self.count < 2 or not self.sigma > 0:
            raise ValueError(f"bins need count >= 2 and sigma > 0, not {self.count} and {self.sigma}.")

    @classmethod
    def between(cls, low: float, high: float) -> ValueBins:
        """101 bins and σ = 1/50 of the range, as published for [−0.1, 1.1]."""
        return cls(low, high, count=101, sigma=(high - low) / 50)

    def edges(self, device: torch.device) -> Tensor:
        """Edges of the bins, shape ``(K + 1,)``, ascending."""
        return torch.linspace(self.low, self.high, self.count + 1, device=device)

    def centres(self, device: torch.device) -> Tensor:
        """Centres of the bins, shape ``(K,)``, ascending."""
        edges = self.edges(device)
        return (edges[1:] + edges[:-1]) / 2

    def expectation(self, logits: Tensor) -> Tensor:
        """Values of the head's outputs: Σ_k softmax(logits)_k × centre_k.

        Example: four bins on [0, 1], probabilities ½, ¼, ⅛, ⅛: 11/32.

        Args:
            logits: shape ``(…, K)``.

        Returns:
            Shape ``(…)``, float32.
        """
        return (logits.float().softmax(-1) * self.centres(logits.device)).sum(-1)

    def head_from(self, weight: Tensor) -> Tensor:
        """Weight of a head with bins whose values start at m + v, for a head v = w · h with one output.

        The logits (c_k − m) v / Var(c), with the centres c and their mean m (the middle of the range), have the
        expectation m + v + O(v³). Values approach the outermost centres as |v| grows; a head of zeros gives m.

        Args:
            weight: shape ``(1, H)``, w.

        Returns:
            Shape ``(K, H)``, of the same dtype.
        """
        centred = self.centres(weight.device) - (self.low + self.high) / 2
        slopes = centred / centred.square().mean()
        return (slopes[:, None] * weight.float()).to(weight.dtype)

    def targets(self, returns: Tensor) -> Tensor:
        """Mass of N(return, σ²) in each bin, relative to the mass in all bins.

        Args:
            returns: any shape; those outside of the bounds count as the nearest bound.

        Returns:
            Shape ``(…, K)``, which adds up to 1.
        """
        centred = self.edges(returns.device) - returns.float().clamp(self.low, self.high)[..., None]
        below_edges = torch.special.erf(centred / (self.sigma * math.sqrt(2)))
        masses = below_edges[..., 1:] - below_edges[..., :-1]
        return masses / (below_edges[..., -1:] - below_edges[..., :1])


def binned_value_loss(
    logits: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    bins: ValueBins,
    num_tokens: Count = None,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Cross-entropy of the bins: −Σ w Σ_k target_k log softmax(logits)_k / num_tokens. Nothing is clipped.

    Its least value is the entropy of the targets, not 0: about 2.1 nats for the published bins.

    Args:
        logits: shape ``(B, R, K)``, differentiable.
        returns: shape ``(B, R)``.
        response_mask: shape ``(B, R)``, bool.
        bins: the bins, K of them.
        num_tokens: denominator; the number of response tokens in these rows with ``None``.
        row_weights: shape ``(B,)``, weight w of each row's tokens; 1 with ``None``.

    Returns:
        The loss in nats per token, and the statistic out_of_bounds (share of returns outside of the bounds).
    """
    num_tokens = token_count(response_mask, num_tokens)
    logits = torch.where(response_mask[..., None], logits.float(), 0.0)
    losses = -(bins.targets(returns) * logits.log_softmax(-1)).sum(-1)
    if row_weights is not None:
        losses = row_weights[:, None] * losses
    loss = torch.where(response_mask, losses, 0.0).sum() / num_tokens
    with torch.no_grad():
        is_outside = response_mask & ((returns < bins.low) | (returns > bins.high))
        stats = {"out_of_bounds": is_outside.sum() / num_tokens}
    return loss, stats
