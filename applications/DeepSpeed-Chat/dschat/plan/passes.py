# SPDX-License-Identifier: Apache-2.0
"""Activations of a forward and backward pass, and a model's sizes, found by running its own code on the meta device.

Every operation runs, and with it transformers' way of computing attention, norms and gradient checkpointing, but
tensors have shapes only; what is alive at each moment is added up. The output head's logits, which
`macro_actions.logprobs` makes in chunks of positions, are worked out beside it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
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
from dschat.models.opening import PLAIN_ATTENTION, SDPA, implementation
from dschat.models.operations import ModelCost, cached_per_token, cost_of
from dschat.plan.shares import COMPILED_ACTIVATIONS
from dschat.plan.states import FLOAT32
from macro_actions.logprobs import chunk_positions

FUSED = "fused_on_meta"  # our name of an attention whose scores are never held, as flash attention's are not
# A causal LM; the same with one number instead of logits; a classifier that reads both ways (BERT and its like), which
# only scores.
Kind = Literal["policy", "scalar", "classifier"]


@dataclass(frozen=True)
class HeadSize:
    """The output head of a policy; a scalar model's has a row, which counts for nothing."""

    vocab: int  # V
    weight: int  # elements, V × H
    tied: bool  # whether it is the embedding, too
    trained: bool  # whether it has a gradient
    width: int  # bytes of an element
    capped: bool = False  # whether the model soft-caps its logits (Gemma-2)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, counted in elements."""

    parameters: int  # all of them
    trained: int  # those with gradients; fewer with LoRA or of a last layer alone
    largest: int  # of the largest tensor
    head: HeadSize
    cached: int  # keys and values that a token leaves in the cache, over all layers
    limit: int | None  # tokens that it can read; None where there is no end


@dataclass(frozen=True)
class Model:
    """What decides a model's passes; equal models share them."""

    config: PreTrainedConfig = field(compare=False)
    kind: Kind
    dtype: torch.dtype  # of the parameters
    attention: str = SDPA  # --attn_implementation
    finetuning: Finetuning = EVERYTHING  # what of it is trained
    top_layers: int = 0  # --trained_layers; 0 = what `finetuning` says
    key: str = field(init=False)  # the config as text

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.config.to_json_string(use_diff=False))

    def make(self) -> Any:
        """The Hugging Face model on the meta device, in training mode."""
        config = copy.deepcopy(self.config)
        is_fused = self.attention not in PLAIN_ATTENTION
        attention = implementation(SDPA if is_fused else self.attention, config)
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
    """Its sizes."""
    made = model.make()
    config, parameters = made.config.get_text_config(), list(made.parameters())
    output, capped = made.get_output_embeddings(), bool(getattr(config, "final_logit_softcapping", None))
    head = HeadSize(0, 0, False, False, model.dtype.itemsize, capped)
    if output is not None:
        weight, tied = output.weight, output.weight is made.get_input_embeddings().weight
        head = replace(head, vocab=len(weight), weight=weight.numel(), tied=tied, trained=weight.requires_grad)
    return Shape(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        largest=max(p.numel() for p in parameters),
        head=head,
        cached=cached_per_token(config),
        limit=position_limit(made),
    )


@lru_cache(maxsize=64)
def cost_of_passes(model: Model) -> ModelCost | None:
    """Operations of its passes; None where they are not known."""
    return cost_of(model.make())


def _fused_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Query, key and value (B, heads, T, width) → (B, T, heads, width); keeps what flash attention keeps."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    output = attend(query, key, value, 0.0, True, False, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(FUSED, _fused_attention)


@dataclass(frozen=True)
class Pass:
    """Bytes of one micro-batch through a model without its head, beside parameters."""

    forward: int  # at the peak of the forward pass
    held: int = 0  # after it
    backward: int = 0  # at the peak of the backward pass; a parameter's gradient counts until it is handed over


class AliveBytes(TorchDispatchMode):
    """Inside, follows every tensor that an operation makes, of the backward pass, too, until nothing refers to it."""

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        """Takes tensors that are there already and do not count, such as a model's parameters."""
        super().__init__()
        self.share = 1.0  # of the bytes of a tensor that is made now: how much of it counts
        self.now = self.peak = 0  # bytes alive, and the most that were at one time since `start_peak`
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
        self._count(key, int(self.share * storage.nbytes()))
        weakref.finalize(storage, self._drop, key)

    def count_whole(self, tensor: Tensor) -> None:
        """Counts all bytes of a tensor, of which a share was counted when it was made."""
        storage = tensor.untyped_storage()
        if self._known.get(storage._cdata):
            self.now -= self._known[storage._cdata]
            self._count(storage._cdata, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        self._known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key)


@lru_cache(maxsize=256)
def training_pass(model: Model, rows: int, tokens: int, recomputed: int, compiled: bool = False) -> Pass:
    """Forward and backward of (rows, tokens) with every gradient handed over at once, as ZeRO takes it.

    Of every so many layers the first is `recomputed` in the backward pass; 0 = none is. Of compiled layers, a measured
    share of what they make counts, also when gradient checkpointing makes it again.
    """
    made = model.make()
    if recomputed:
        enable_gradient_checkpointing(made, recomputed)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_hand_over)
    with AliveBytes([*made.parameters(), *made.buffers()]) as alive:
        if compiled:
            _count_compiled(made, alive)
        states = _states(made, rows, tokens)
        forward, held = alive.peak, alive.now
        alive.start_peak()
        if states.requires_grad:  # not where the last layer alone is trained, unless it is the embedding, too
            states.backward(torch.empty_like(states))
        return Pass(forward, held, alive.peak)


@lru_cache(maxsize=256)
def scoring_pass(model: Model, rows: int, tokens: int) -> Pass:
    """A forward pass of (rows, tokens) without gradients; held are its states, for the head."""
    made = model.make().eval()
    with torch.no_grad(), AliveBytes([*made.parameters(), *made.buffers()]) as alive:
        states = _states(made, rows, tokens)
        return Pass(alive.peak, states.nbytes)


def _states(model: Any, rows: int, tokens: int) -> Tensor:
    """The last hidden states (B, T, H)."""
    input_ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    fused, mask = model.config._attn_implementation == FUSED, None
    try:
        if type(model).__name__.endswith("ForSequenceClassification"):  # makes its mask itself
            mask = None if fused else torch.ones(rows, tokens, dtype=torch.long, device="meta")
            return cast(Tensor, model(input_ids=input_ids, attention_mask=mask).logits)
        backbone = getattr(model, model.base_model_prefix, model)  # a scalar model is a backbone with a score layer
        if not fused:  # attention that holds its scores gets a ready mask
            mask = torch.zeros(rows, 1, tokens, tokens, dtype=model.dtype, device="meta")
        output: Tensor = backbone(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UserError(
            f"the memory of a {model.config.model_type} model cannot be planned: it does not run without weights"
            f" ({str(error).splitlines()[0]})."
        ) from error
    return output


def _count_compiled(model: Any, alive: AliveBytes) -> None:
    """From now on, a share of what the layers of a decoder make counts, but their results count whole."""
    decoder = find_layers(model)
    layers: Iterable[Any] = () if decoder is None else decoder.layers
    for layer in layers:
        layer.forward = _counted(layer.forward, alive)
        checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
        if checkpoint is not None:  # it calls the class's forward, now and when the layer is computed again
            layer._gradient_checkpointing_func = partial(_counted_checkpoint, checkpoint, alive)


def _counted(function: Callable[..., Any], alive: AliveBytes) -> Callable[..., Any]:
    """The forward of a compiled layer."""

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        alive.share = COMPILED_ACTIVATIONS
        try:
            output = function(*args, **kwargs)
        finally:  # a recomputation ends by an exception as soon as it has made what is needed
            alive.share = 1.0
        alive.count_whole(output[0] if isinstance(output, tuple) else output)
        return output

    return forward


def _counted_checkpoint(
    checkpoint: Callable[..., Any], alive: AliveBytes, function: Callable[..., Any], *args: Any
) -> Any:
    """Gradient checkpointing of a compiled layer."""
    return checkpoint(_counted(function, alive), *args)


def _hand_over(parameter: Tensor) -> None:
    parameter.grad = None


def training_logits(head: HeadSize, positions: int, device: torch.device) -> Pass:
    """Log-probs of `positions` tokens with gradients, in bytes.

    The softmax is made in the logits' place. Where all positions make one chunk it is kept for the backward pass; else
    each chunk is made again. Soft-capping keeps its result and works on two more tensors in the backward pass; the
    entropy takes one more on a GPU.

    A trained head's gradient is added up in float32 beside that of a chunk; a frozen head has none.
    """
    chunk = chunk_positions(head.vocab, device)
    kept = positions <= chunk
    logits = FLOAT32 * head.vocab * min(positions, chunk)
    entropy = 0 if device.type == "cpu" else logits
    graph = logits * (1 + head.capped)
    half = logits // 2 if head.width < FLOAT32 else 0  # the logits' gradient in the head's format
    of_chunk = max(half, 2 * logits * head.capped) + head.trained * head.width * head.weight
    again = 0 if kept else _converted(head, device)
    return Pass(
        forward=graph + entropy + _converted(head, device),
        held=graph if kept else 0,
        backward=graph + head.trained * FLOAT32 * head.weight + max(of_chunk, again),
    )


def kept_gradient(head: HeadSize) -> int:
    """Bytes of the head's gradient during the rest of the backward pass.

    An embedding that is the head, too, has the sum of both gradients only at the end.
    """
    return head.width * head.weight if head.tied and head.trained else 0


def scoring_logits(head: HeadSize, positions: int, device: torch.device) -> int:
    """Bytes of log-probs of `positions` tokens without gradients and entropy."""
    chunk = min(positions, chunk_positions(head.vocab, device))
    return FLOAT32 * head.vocab * chunk * (1 + head.capped) + _converted(head, device)


def sampling_logits(head: HeadSize, rows: int, device: torch.device) -> int:
    """Bytes of the next token's distributions."""
    return SAMPLING_BUFFERS * FLOAT32 * rows * head.vocab + _converted(head, device)


def _converted(head: HeadSize, device: torch.device) -> int:
    """On a CPU, a head in half precision is multiplied in float32."""
    return FLOAT32 * head.weight if device.type == "cpu" and head.width < FLOAT32 else 0
