# SPDX-License-Identifier: Apache-2.0
"""Output layers: float32 outputs for models in bf16 or fp16, and the start of score heads at zero.

A score or logit of 20 in bf16 represents anything from 19.94 to 20.06. The weights keep their dtype; the products are
accumulated and returned in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Names in a Hugging Face classifier.
HEAD = "score."
GAIN = "score.gain"


def zero_head(head: nn.Linear) -> None:
    """Sets a head to zero, so that a critic's first values are 0."""
    for parameter in head.parameters():
        nn.init.zeros_(parameter)


def keep_float32(head: nn.Module | None) -> None:
    """Makes an ordinary linear layer return float32, in place, with the same parameter names; other layers stay."""
    if type(head) is nn.Linear:
        head.__class__ = Float32Linear


class Float32Linear(nn.Linear):
    """A linear layer that returns float32, whatever the dtype of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, V) float32."""
        if self.weight.dtype == torch.float32:
            return F.linear(x, self.weight, self.bias)
        product = _Product.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
        return product if self.bias is None else product + self.bias.float()


class _Product(torch.autograd.Function):
    """x (N, H) times the transposed weight (V, H), both in half precision → (N, V) float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        needs_x_grad, needs_weight_grad = ctx.needs_input_grad
        x_grad = grad @ weight if needs_x_grad else None
        # A weight gradient is as large as the head, for every chunk of rows.
        weight_grad = grad.t() @ x if needs_weight_grad else None
        return x_grad, weight_grad


def folded(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Folds a head's gain into the weights of its head, as a plain classifier has them.

    Args:
        weights: name and tensor, one at a time; the gain comes after the head's other weights, or is missing.
    """
    head_weights: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name == GAIN:
            for head_name, weight in head_weights.items():
                yield head_name, (weight.float() * tensor.float()).to(weight.dtype)
            head_weights.clear()
        elif name.startswith(HEAD):
            head_weights[name] = tensor.clone()
        else:
            yield name, tensor
    yield from head_weights.items()
