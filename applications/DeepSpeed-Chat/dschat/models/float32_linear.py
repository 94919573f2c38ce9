# SPDX-License-Identifier: Apache-2.0
"""Heads whose numbers stay float32: logits and scores of a model in bf16 or fp16.

A score of 20 in bf16 stands for anything from 19.94 to 20.06, and so does a logit. The weights stay what they are; the
products are added up and kept in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def keep_float32(head: nn.Module | None) -> None:
    """Makes an ordinary linear layer give float32; its parameters, and their names, stay.

    Args:
        head: of a model; other kinds of layers, and None, are left alone.
    """
    if type(head) is nn.Linear:
        head.__class__ = Float32Linear


class Float32Linear(nn.Linear):
    """A linear layer that gives float32, whatever its parameters are."""

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
        of_x, of_weight = ctx.needs_input_grad  # a frozen head's would be as large as the head, for every chunk
        return grad @ weight if of_x else None, grad.t() @ x if of_weight else None
