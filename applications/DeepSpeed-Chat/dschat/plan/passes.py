# SPDX-License-Identifier: Apache-2.0
"""Activations of a forward and backward pass, measured by running a model on the meta device.

Every operation of the model's own code runs, gradient checkpointing included, but tensors have shapes only; the bytes
that are alive at each moment are added up. The logits of the output head, which `macro_actions.logprobs` computes in
chunks of positions, are computed here by formulas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dschat.base.errors import UserError
from dschat.models.finetuning import enable_gradient_checkpointing
from dschat.models.layers import find_layers
from dschat.models.layout import SAMPLING_BUFFERS
from dschat.plan.shares import COMPILED_ACTIVATIONS
from dschat.plan.sizes import FUSED, HeadSize, Model
from dschat.plan.states import FLOAT32
from macro_actions.logprobs import chunk_positions


@dataclass(frozen=True)
class Pass:
    """Bytes of one micro-batch in a model without its head; parameters do not count."""

    forward: int  # peak of the forward pass
    held: int = 0  # what the forward pass leaves for the backward pass
    backward: int = 0  # peak of the backward pass; a parameter's gradient counts until ZeRO takes it


class AliveBytes(TorchDispatchMode):
    """Context that follows every tensor that an operation creates, in the backward pass too, until it is freed."""

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        """Starts counting; tensors that exist already, such as a model's parameters, do not count."""
        super().__init__()
        self.share = 1.0  # the part of a new tensor's bytes that counts
        self.now = 0  # bytes alive
        self.peak = 0  # maximum of `now` since `start_peak`
        # Held, so that no address is reused.
        self._existing = [tensor.untyped_storage() for tensor in existing]
        self._counted: dict[int, int] = {storage._cdata: 0 for storage in self._existing}  # address → bytes

    def start_peak(self) -> None:
        """Forgets the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        """Runs the operation and counts the tensors that it created."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count_new(tensor.untyped_storage())
        return result

    def _count_new(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key in self._counted:
            return
        self._count(key, int(self.share * storage.nbytes()))
        weakref.finalize(storage, self._drop, key)

    def count_whole(self, tensor: Tensor) -> None:
        """Counts all bytes of a tensor that has been counted in part so far."""
        storage = tensor.untyped_storage()
        counted = self._counted.get(storage._cdata)
        if counted:
            self.now -= counted
            self._count(storage._cdata, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        self._counted[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._counted.pop(key)


@lru_cache(maxsize=256)
def training_pass(model: Model, rows: int, tokens: int, recomputed: int, compiled: bool = False) -> Pass:
    """Forward and backward pass of a (rows, tokens) batch; every gradient is freed at once, as ZeRO takes it.

    Args:
        model: the model.
        rows: sequences in the batch.
        tokens: length of each sequence.
        recomputed: the first of every `recomputed` layers is recomputed in the backward pass; 0: none.
        compiled: whether layers are compiled. A measured share of a compiled layer's activations counts, also when
            gradient checkpointing recomputes them.
    """
    module = model.make()
    if recomputed:
        enable_gradient_checkpointing(module, recomputed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_free_gradient)
    with AliveBytes([*module.parameters(), *module.buffers()]) as alive:
        if compiled:
            _count_compiled(module, alive)
        states = _hidden_states(module, rows, tokens)
        forward = alive.peak
        held = alive.now
        alive.start_peak()
        # There is no gradient if only the last layer is trained, unless the head is also the embedding.
        if states.requires_grad:
            states.backward(torch.empty_like(states))
        return Pass(forward, held, alive.peak)


@lru_cache(maxsize=256)
def scoring_pass(model: Model, rows: int, tokens: int) -> Pass:
    """Forward pass of a (rows, tokens) batch without gradients; `held` are the hidden states, which the head reads."""
    module = model.make().eval()
    with torch.no_grad(), AliveBytes([*module.parameters(), *module.buffers()]) as alive:
        states = _hidden_states(module, rows, tokens)
        return Pass(alive.peak, states.nbytes)


def _hidden_states(model: Any, rows: int, tokens: int) -> Tensor:
    """The last hidden states (B, T, H); a classifier's output instead.

    Raises:
        UserError: the model's code does not run on the meta device.
    """
    input_ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    fused = model.config._attn_implementation == FUSED
    mask = None
    try:
        if type(model).__name__.endswith("ForSequenceClassification"):
            # It expands the mask itself.
            if not fused:
                mask = torch.ones(rows, tokens, dtype=torch.long, device="meta")
            return cast(Tensor, model(input_ids=input_ids, attention_mask=mask).logits)
        # A scalar model is a backbone with a score layer.
        backbone = getattr(model, model.base_model_prefix, model)
        if not fused:
            # Attention that stores its scores gets an expanded mask.
            mask = torch.zeros(rows, 1, tokens, tokens, dtype=model.dtype, device="meta")
        output: Tensor = backbone(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UserError(
            f"the memory of a {model.config.model_type} model cannot be planned: it does not run without weights"
            f" ({str(error).splitlines()[0]})."
        ) from error
    return output


def _count_compiled(model: Any, alive: AliveBytes) -> None:
    """Counts only a share of the tensors that a decoder's layers create from now on; their outputs count in full."""
    decoder = find_layers(model)
    layers: Iterable[Any] = () if decoder is None else decoder.layers
    for layer in layers:
        layer.forward = _counted(layer.forward, alive)
        checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            # It calls the class's own forward, both now and when the layer is recomputed.
            layer._gradient_checkpointing_func = partial(_counted_checkpoint, checkpoint, alive)


def _counted(function: Callable[..., Any], alive: AliveBytes) -> Callable[..., Any]:
    """A layer's forward, counted as if the layer were compiled."""

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        alive.share = COMPILED_ACTIVATIONS
        try:
            output = function(*args, **kwargs)
        finally:
            # A recomputation ends with an exception as soon as it has recomputed what is needed.
            alive.share = 1.0
        alive.count_whole(output[0] if isinstance(output, tuple) else output)
        return output

    return forward


def _counted_checkpoint(
    checkpoint: Callable[..., Any], alive: AliveBytes, function: Callable[..., Any], *args: Any
) -> Any:
    """Gradient checkpointing of a layer, counted as if the layer were compiled."""
    return checkpoint(_counted(function, alive), *args)


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def training_logits(head: HeadSize, positions: int, device: torch.device) -> Pass:
    """Log-probs of `positions` tokens with gradients, in bytes.

    The softmax overwrites the logits. If all positions fit one chunk it is kept for the backward pass; otherwise each
    chunk is recomputed. Soft-capping keeps its result and needs two more tensors in the backward pass; the entropy
    needs one more on a GPU.

    A trained head's gradient is that of the only chunk, or the float32 sum over chunks beside that of one chunk. A
    frozen head has none.
    """
    chunk = chunk_positions(head.vocab, device)
    is_one_chunk = positions <= chunk
    logits = FLOAT32 * head.vocab * min(positions, chunk)
    entropy = 0 if device.type == "cpu" else logits
    graph = logits * (1 + head.capped)
    # The logits' gradient in the head's dtype.
    half_gradient = logits // 2 if head.width < FLOAT32 else 0
    chunk_gradients = max(half_gradient, 2 * logits * head.capped) + head.trained * head.width * head.weight
    recomputed = 0 if is_one_chunk else _converted_head(head, device)
    gradient_sum = 0 if is_one_chunk else head.trained * FLOAT32 * head.weight
    return Pass(
        forward=graph + entropy + _converted_head(head, device),
        held=graph if is_one_chunk else 0,
        backward=graph + gradient_sum + max(chunk_gradients, recomputed),
    )


def tied_head_gradient(head: HeadSize) -> int:
    """Bytes of the head's gradient that stay until the end of the backward pass.

    They are 0 unless the head shares its weight with the embedding, whose gradient is added at the end.
    """
    return head.width * head.weight if head.tied and head.trained else 0


def scoring_logits(head: HeadSize, positions: int, device: torch.device) -> int:
    """Bytes for the log-probs of `positions` tokens without gradients and entropy."""
    chunk = min(positions, chunk_positions(head.vocab, device))
    logits = FLOAT32 * head.vocab * chunk
    return logits * (1 + head.capped) + _converted_head(head, device)


def sampling_logits(head: HeadSize, rows: int, device: torch.device) -> int:
    """Bytes for the next-token distributions of `rows` sequences."""
    return SAMPLING_BUFFERS * FLOAT32 * rows * head.vocab + _converted_head(head, device)


def _converted_head(head: HeadSize, device: torch.device) -> int:
    """Bytes of the float32 copy that a CPU multiplies with, for a head in half precision."""
    return FLOAT32 * head.weight if device.type == "cpu" and head.width < FLOAT32 else 0
