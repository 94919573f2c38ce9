# SPDX-License-Identifier: Apache-2.0
"""Activations of a forward and backward pass, and a model's sizes, measured by running it on the meta device.

Every operation of the model's own code runs, gradient checkpointing included, but tensors have shapes only; the bytes
that are alive at each moment are added up. The logits of the output head, which `macro_actions.logprobs` computes in
chunks of positions, are computed here by formulas.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from typing import Any, Literal, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dschat.base.errors import UserError
from dschat.models.finetuning import (
    EVERYTHING,
    Finetuning,
    choose_trained,
    enable_gradient_checkpointing,
    train_top_layers,
)
from dschat.models.layers import find_layers
from dschat.models.layout import SAMPLING_BUFFERS
from dschat.models.limits import position_limit
from dschat.models.opening import PLAIN_ATTENTION, SDPA, resolve_attention
from dschat.models.operations import ModelCost, cached_per_token, cost_of
from dschat.plan.shares import COMPILED_ACTIVATIONS
from dschat.plan.states import FLOAT32
from macro_actions.logprobs import chunk_positions

FUSED = "fused_on_meta"  # an attention that never stores its scores, as flash attention does
# A causal LM; a causal LM with one number per token instead of logits; a bidirectional classifier such as BERT, which
# only scores.
Kind = Literal["policy", "scalar", "classifier"]


@dataclass(frozen=True)
class HeadSize:
    """The output head of a policy. All 0 for a scalar model, whose head has a single row."""

    vocab: int  # V
    weight: int  # elements, V × H
    tied: bool  # whether it shares its weight with the embedding
    trained: bool  # whether it has a gradient
    width: int  # bytes per element
    capped: bool = False  # whether the model soft-caps its logits (Gemma-2)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, in elements."""

    parameters: int
    trained: int  # parameters with gradients: fewer with LoRA or if only the last layers are trained
    largest: int  # elements of the largest tensor
    head: HeadSize
    cached: int  # keys and values per token in the cache, over all layers
    limit: int | None  # maximum number of positions; None without a limit


@dataclass(frozen=True)
class Model:
    """The key of the cached measurements: models that compare equal have the same passes."""

    config: PreTrainedConfig = field(compare=False)
    kind: Kind
    dtype: torch.dtype  # dtype of the parameters
    attention: str = SDPA  # --attn_implementation
    finetuning: Finetuning = EVERYTHING  # which parameters are trained
    top_layers: int = 0  # --trained_layers; 0: as `finetuning` says
    key: str = field(init=False)  # the config as text

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.config.to_json_string(use_diff=False))

    def make(self) -> Any:
        """The Hugging Face model on the meta device, in training mode."""
        config = copy.deepcopy(self.config)
        is_fused = self.attention not in PLAIN_ATTENTION
        attention = resolve_attention(SDPA if is_fused else self.attention, config)
        options: dict[str, Any] = {"dtype": self.dtype, "attn_implementation": attention}
        with torch.device("meta"):
            if self.kind == "policy":
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
            elif self.kind == "classifier":
                config.num_labels = 1
                model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False, **options)
            else:
                model = AutoModel.from_config(config, trust_remote_code=False, **options)
                width = model.get_input_embeddings().weight.shape[1]
                model.score = nn.Linear(width, 1, bias=False, dtype=self.dtype)
            choose_trained(model, self.finetuning, "the model")
            if self.top_layers:
                train_top_layers(model, self.top_layers, "--trained_layers")
        if model.config._attn_implementation == SDPA or is_fused:
            model.config._attn_implementation = FUSED
        return model.train()


@lru_cache(maxsize=64)
def shape_of(model: Model) -> Shape:
    """The sizes of a model."""
    module = model.make()
    config = module.config.get_text_config()
    sizes = [parameter.numel() for parameter in module.parameters()]
    trained_sizes = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            trained_sizes.append(parameter.numel())
    return Shape(
        parameters=sum(sizes),
        trained=sum(trained_sizes),
        largest=max(sizes),
        head=_head_size(module, model.dtype.itemsize),
        cached=cached_per_token(config),
        limit=position_limit(module),
    )


def _head_size(module: Any, width: int) -> HeadSize:
    config = module.config.get_text_config()
    capped = bool(getattr(config, "final_logit_softcapping", None))
    head = module.get_output_embeddings()
    if head is None:
        return HeadSize(vocab=0, weight=0, tied=False, trained=False, width=width, capped=capped)
    return HeadSize(
        vocab=len(head.weight),
        weight=head.weight.numel(),
        tied=head.weight is module.get_input_embeddings().weight,
        trained=head.weight.requires_grad,
        width=width,
        capped=capped,
    )


@lru_cache(maxsize=64)
def cost_of_passes(model: Model) -> ModelCost | None:
    """Operations of a model's passes; None for an architecture whose operations are unknown."""
    return cost_of(model.make())


def _fused_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Query, key and value (B, heads, T, width) → (B, T, heads, width); stores what flash attention stores."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    output = attend(query, key, value, 0.0, True, False, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(FUSED, _fused_attention)


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
