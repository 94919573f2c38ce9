# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients that are not finite: which process they come from, before sums over processes spread them."""

import math
from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from dschat.run.distributed import device


def accumulation_of(parameter: nn.Parameter) -> Any:
    """The node of the graph where a parameter's gradient arrives; it remembers the shape the parameter has now."""
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")), torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class SkippingAdamW(torch.optim.AdamW):
    """AdamW that does nothing while `overflow` is set; by that name DeepSpeed knows, and leaves the schedule alone."""

    overflow = False

    def step(self, closure: Any = None) -> Any:
        """One step, or none."""
        return None if self.overflow else super().step(closure)


class FiniteWatch:
    """Watches this process's own losses and gradients of an update; nothing waits for the device until `read`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hangs on every trained parameter, where its gradient arrives: before DeepSpeed sums it over processes."""
        self._reset()
        self._nodes = [accumulation_of(parameter) for parameter in parameters if parameter.requires_grad]
        for node in self._nodes:  # kept: a node that nobody holds is made anew, without the hook
            node.register_prehook(self._note)

    def _reset(self) -> None:
        # The largest magnitudes so far: NaN and infinities prevail over everything else.
        self._loss, self._gradient = torch.zeros(2, device=device()).unbind()

    def _note(self, gradients: tuple[Tensor | None, ...]) -> None:
        for gradient in gradients:
            if gradient is not None and gradient.numel():
                largest = torch.linalg.vector_norm(gradient.detach(), math.inf).float()
                self._gradient = torch.maximum(self._gradient, largest)

    def factor(self, loss: Tensor) -> Tensor:
        """Notes a loss. 1, or NaN where the loss is not finite: its gradient may be, and must not be applied."""
        loss = loss.detach().float()
        self._loss = torch.maximum(self._loss, loss.abs())
        return torch.where(loss.isfinite(), 1.0, math.nan)

    def read(self, norm: Tensor | float) -> tuple[bool, bool, float]:
        """Whether the losses and the gradients since the last call were finite; and a number, read with them."""
        norm = torch.as_tensor(norm, dtype=torch.float32, device=self._loss.device)
        loss, gradient, number = torch.stack([self._loss, self._gradient, norm]).tolist()
        self._reset()
        return math.isfinite(loss), math.isfinite(gradient), number
