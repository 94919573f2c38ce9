# SPDX-License-Identifier: Apache-2.0
"""Activations of a forward and backward pass, found by running the model's own code on the meta device.

Every operation runs, and with it transformers' way of computing attention, norms and gradient checkpointing, but
tensors have shapes only; what is alive at each moment is added up. The output head is not part of it: see `logits`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dschat.errors import UserError
from dschat.models.finetuning import enable_gradient_checkpointing
from dschat.plan.shapes import FUSED


@dataclass(frozen=True)
class Pass:
    """Bytes of one micro-batch through a model without its head, beside parameters.

    Attributes:
        forward: at the peak of the forward pass.
        held: between forward and backward.
        backward: at the peak of the backward pass; a parameter's gradient counts until it is handed over.
    """

    forward: int
    held: int = 0
    backward: int = 0


class AliveBytes(TorchDispatchMode):
    """Inside, follows every tensor that an operation makes, of the backward pass, too, until nothing refers to it.

    Attributes:
        now: bytes alive.
        peak: the most that were alive at one time since `start_peak`.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        """Takes tensors that are there already and do not count, such as a model's parameters."""
        super().__init__()
        self.now = self.peak = 0
        self._existing = [tensor.untyped_storage() for tensor in existing]  # held, so that none is used again
        self._known: dict[int, int] = {storage._cdata: 0 for storage in self._existing}  # storage → bytes

    def start_peak(self) -> None:
        """Forgets earlier peaks."""
        self.peak = self.now

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        """Runs the operation and notes what it made."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key)


def training_pass(model: Any, rows: int, tokens: int, checkpointing: bool) -> Pass:
    """Forward and backward with every gradient handed over at once, as ZeRO takes it.

    Args:
        model: of `meta_model`.
        rows, tokens: (B, T) of the micro-batch.
        checkpointing: gradient checkpointing.
    """
    if checkpointing:
        enable_gradient_checkpointing(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_hand_over)
    with AliveBytes([*model.parameters(), *model.buffers()]) as alive:
        states = _states(model, rows, tokens)
        forward, held = alive.peak, alive.now
        alive.start_peak()
        if states.requires_grad:  # not where the last layer alone is trained, unless it is the embedding, too
            states.backward(torch.empty_like(states))
        return Pass(forward, held, alive.peak)


def scoring_pass(model: Any, rows: int, tokens: int) -> Pass:
    """A forward pass without gradients."""
    with torch.no_grad(), AliveBytes([*model.parameters(), *model.buffers()]) as alive:
        _states(model.eval(), rows, tokens)
        return Pass(alive.peak)


def _states(model: Any, rows: int, tokens: int) -> Tensor:
    """The last hidden states (B, T, H)."""
    backbone = getattr(model, model.base_model_prefix, model)  # a scalar model is a backbone with a score layer
    input_ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    mask = None
    if model.config._attn_implementation != FUSED:  # attention that holds its scores gets a ready mask
        mask = torch.zeros(rows, 1, tokens, tokens, dtype=model.dtype, device="meta")
    try:
        output: Tensor = backbone(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UserError(
            f"the memory of a {model.config.model_type} model cannot be planned: it does not run without weights"
            f" ({str(error).splitlines()[0]})."
        ) from error
    return output


def _hand_over(parameter: Tensor) -> None:
    parameter.grad = None
