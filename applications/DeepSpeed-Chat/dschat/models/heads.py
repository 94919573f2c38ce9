# SPDX-License-Identifier: Apache-2.0
"""Output layers whose numbers stay float32, of models in bf16 or fp16; how a new score head starts; and a score head's
learnable factor, the gain.

A score of 20 in bf16 stands for anything from 19.94 to 20.06, and so does a logit. The weights stay what they are; the
products are added up and kept in float32.

The gain goes into the head's weights when the model is saved. There is no learnable offset beside it: it cancels in
every difference of scores, so that pairs do not teach it, and Hugging Face's score heads have no bias that could hold
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD, GAIN = "score.", "score.gain"  # names in a Hugging Face classifier


def zero_head(head: nn.Linear) -> None:
    """Sets a head to zero: a critic's first values are then 0, whatever the model computes."""
    for parameter in head.parameters():
        nn.init.zeros_(parameter)


def draw_head(head: nn.Linear, seed: int) -> None:
    """Draws a reward model's head of width H from N(0, 1 / (H + 1)), and sets its bias to 0.

    Hidden states leave the last norm with about unit variance in every dimension, so the first scores are of order 1,
    and the gradient reaches the layers below from the first update on. From a head of zeros both must first grow,
    which takes hundreds of updates at the rates of large models. The draw is the same on every process, in every dtype
    (up to its rounding) and on every device.

    Source: Stiennon et al. 2020, appendix B.1; Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO".
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1)
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


def keep_float32(head: nn.Module | None) -> None:
    """Makes an ordinary linear layer give float32; its parameters, and their names, stay. Other kinds of layers are
    left alone.
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


class GainedLinear(Float32Linear):
    """A linear layer in float32 times one learnable number, 1 at the start."""

    gain: nn.Parameter  # (1,)

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, V) float32."""
        return super().forward(x) * self.gain.float()


def add_gain(head: nn.Linear) -> None:
    """Gives a score head its factor; the head is changed in place."""
    head.__class__ = GainedLinear
    head.gain = nn.Parameter(torch.ones(1, dtype=head.weight.dtype, device=head.weight.device))


def folded(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a plain classifier, one at a time: those of its head times the factor, which comes after them;
    without one, they stay as they are.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name == GAIN:
            yield from ((own, (x.float() * tensor.float()).to(x.dtype)) for own, x in waiting.items())
            waiting.clear()
        elif name.startswith(HEAD):
            waiting[name] = tensor.clone()
        else:
            yield name, tensor
    yield from waiting.items()
