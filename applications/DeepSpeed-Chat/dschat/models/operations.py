# SPDX-License-Identifier: Apache-2.0
"""What the passes of a model must compute and read, from its weights and the lengths of texts.

Operations are multiplications and additions: two for each weight and token. Only what the task needs counts
(Chowdhery et al. 2022, "PaLM", appendix B): no recomputation, no padding, no norms, no embedding look-ups.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from dschat.models.layout import Integers, Lengths

logger = logging.getLogger(__name__)

LAYER_NUMBER = re.compile(r"\.(\d+)\.")
BELOW_LAYERS = -1  # in the place of a layer's number: embeddings, and what projects them
# Kinds of layers whose attention compares a token with all tokens before it, or with those of a window.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of one setting in different families

Window = int | None  # keys that a token sees at most; None: all of its text up to itself


@dataclass(frozen=True)
class Peaks:
    """The most that a GPU does in a second."""

    operations_per_second: float  # of matrix products
    bytes_per_second: float  # of its memory, bytes read and bytes written


@dataclass(frozen=True)
class PassCost:
    """Operations of a pass, by what they grow with."""

    per_token: float  # of the layers' matrices
    per_key: Mapping[Window, float]  # of attention, for each key that a token sees, by the layers' window
    per_target: float  # of the output head, for each token whose log-prob is computed

    def operations(self, lengths: Integers, targets: int) -> float:
        """Operations on texts of these lengths (n,) in tokens, with log-probs of so many of their tokens."""
        attention = sum(cost * seen_keys(lengths, window) for window, cost in self.per_key.items())
        return self.per_token * float(lengths.sum()) + attention + self.per_target * targets


@dataclass(frozen=True)
class ModelCost:
    """What the passes of a model take."""

    forward: PassCost
    # A trained weight takes twice its forward pass: gradients of activations and of the weight. A frozen one, such as
    # those beside LoRA adapters, takes the gradients of activations alone, and nothing below the first layer that has
    # trained weights. Attention takes twice its forward pass.
    backward: PassCost
    step_bytes: float | None  # weights that a decoding step reads; None with experts, of which it reads some
    cache_bytes: Mapping[Window, float]  # keys and values that a token reads for each key that it sees

    def training_operations(self, lengths: Integers, targets: int) -> float:
        """Operations of a forward and a backward pass; see `PassCost.operations`."""
        return self.forward.operations(lengths, targets) + self.backward.operations(lengths, targets)


def seen_keys(lengths: Integers, window: Window = None) -> int:
    """Keys that the tokens of causal texts see together, each token its own included.

    Those of n tokens are n (n + 1) / 2; with a window of w keys, token t sees min(t, w).
    """
    within = lengths if window is None else np.minimum(lengths, window)
    return int((within * (within + 1) // 2 + (lengths - within) * within).sum())


def decoding_steps(responses: Integers, slots: int) -> int:
    """The fewest steps that sample responses of these lengths (n,), so many rows at a time."""
    return max(int(responses.max(initial=0)), -(-int(responses.sum()) // slots))


def decoding_bytes(cost: ModelCost, lengths: Lengths, slots: int) -> float | None:
    """Bytes that must be read to sample responses, so many rows at a time; None with experts.

    Each of `decoding_steps` reads the weights once, and each token of a response but the last the keys and values of
    all tokens that it sees.
    """
    if cost.step_bytes is None:
        return None
    computed = lengths.prompts + np.maximum(lengths.responses - 1, 0)
    cached = 0.0
    for window, size in cost.cache_bytes.items():
        cached += size * (seen_keys(computed, window) - seen_keys(lengths.prompts, window))
    return decoding_steps(lengths.responses, slots) * cost.step_bytes + cached


def cost_of(model: Any) -> ModelCost | None:
    """The cost of a Hugging Face causal LM, classifier or decoder, whose weights may be sharded or on meta.

    Attention counts as causal. Experts of a mixture count as far as a token passes through them. None where layers
    are not ordinary attention, full or sliding, or where the config does not say how many experts are active.
    """
    config = model.config.get_text_config()
    backbone = getattr(model, model.base_model_prefix, model)
    matrices = list(_matrices(backbone))
    windows, active = _windows(config), 1.0
    has_experts = any(matrix.is_expert for matrix in matrices)
    if has_experts:
        active = _active_share(config)
    if windows is None or not active or not isinstance(getattr(config, "num_attention_heads", None), int):
        return None
    first = _first_trained_layer(backbone)
    forward = backward = 0.0
    for matrix in matrices:
        operations = 2.0 * matrix.elements * (active if matrix.is_expert else 1.0)
        forward += operations
        backward += operations * (matrix.is_trained + _passes_gradients(matrix.layer, first))
    above = [window for layer, window in enumerate(windows) if _passes_gradients(layer, first)]
    attention = _attention_operations(config)
    head = _head(model)
    head_operations = 2.0 * head.elements
    head_gradients = head.is_trained + (first is not None)
    width = next(backbone.parameters()).element_size()
    read = width * (head.elements + sum(matrix.elements for matrix in matrices))
    cached = 2.0 * width * _key_value_width(config)
    return ModelCost(
        forward=PassCost(forward, _by_window(windows, attention), head_operations),
        backward=PassCost(backward, _by_window(above, 2 * attention), head_operations * head_gradients),
        step_bytes=None if has_experts else float(read),
        cache_bytes=_by_window(windows, cached),
    )


def cached_per_token(config: PreTrainedConfig) -> int:
    """Elements of keys and values of one token: 2 × layers × key-value heads × width of a head."""
    return int(2 * config.num_hidden_layers * _key_value_width(config))


@dataclass(frozen=True)
class _Matrix:
    """A weight that tokens are multiplied with."""

    elements: int
    layer: int  # its number, or BELOW_LAYERS
    is_trained: bool
    is_expert: bool = False


def _matrices(backbone: nn.Module) -> Iterator[_Matrix]:
    """The matrices of a decoder, of its layers and beside them, without embeddings and a scalar head."""
    embeddings = [module for module in backbone.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(module.weight) for module in embeddings}
    for name, parameter in backbone.named_parameters():
        is_matrix = len(_shape(parameter)) >= 2 and not name.endswith("bias")
        if is_matrix and id(parameter) not in looked_up and not name.startswith("score."):
            yield _Matrix(_elements(parameter), _layer_of(name), parameter.requires_grad, ".experts." in name)


def _head(model: Any) -> _Matrix:
    """The output head of a causal LM; without elements for a model that has none."""
    output = model.get_output_embeddings()
    if output is None:
        return _Matrix(0, BELOW_LAYERS, is_trained=False)
    return _Matrix(_elements(output.weight), BELOW_LAYERS, output.weight.requires_grad)


def _first_trained_layer(backbone: nn.Module) -> int | None:
    """The number of the first layer with trained weights, or BELOW_LAYERS; None where no part of it is trained.

    What stands outside of the layers, is trained, and is no matrix is a norm behind them.
    """
    layers = []
    for name, parameter in backbone.named_parameters():
        layer = _layer_of(name)
        is_norm = layer == BELOW_LAYERS and len(_shape(parameter)) < 2
        if parameter.requires_grad and not is_norm and not name.startswith("score."):
            layers.append(layer)
    return min(layers, default=None)


def _passes_gradients(layer: int, first: int | None) -> bool:
    return first is not None and layer >= first


def _layer_of(name: str) -> int:
    number = LAYER_NUMBER.search(f".{name}")
    return BELOW_LAYERS if number is None else int(number[1])


def _shape(parameter: nn.Parameter) -> Sequence[int]:
    """The shape of the whole weight, of which ZeRO 3 leaves a part."""
    shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _elements(parameter: nn.Parameter) -> int:
    return int(np.prod(_shape(parameter), dtype=np.int64))


def _windows(config: PreTrainedConfig) -> list[Window] | None:
    """The window of each layer's attention; None where a layer is of another kind."""
    kinds = get_layer_types_and_kwargs(config)[0]
    if not set(kinds) <= ATTENTION_LAYERS:
        return None
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def _active_share(config: PreTrainedConfig) -> float:
    """The share of a mixture's experts that a token passes through; 0 where the config does not say it."""
    total = next((getattr(config, name) for name in NUM_EXPERTS if getattr(config, name, None)), None)
    active = getattr(config, "num_experts_per_tok", None)
    return active / total if active and total else 0.0


def _head_width(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _key_value_width(config: PreTrainedConfig) -> int:
    """Elements of a layer's keys and of its values, of one token: the mean of the two."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1  # Falcon 7B
    width = _head_width(config)
    keys = getattr(config, "qk_head_dim", None) or width  # of latent attention, where the two differ
    values = getattr(config, "v_head_dim", None) or width
    return int(heads * (keys + values) / 2)


def _attention_operations(config: PreTrainedConfig) -> float:
    """Operations of a layer for each key that a token sees: its product with the query, and that with the value."""
    width = _head_width(config)
    keys = getattr(config, "qk_head_dim", None) or width  # of latent attention, where the two differ
    values = getattr(config, "v_head_dim", None) or width
    return 2.0 * config.num_attention_heads * (keys + values)


def _by_window(windows: Sequence[Window], cost: float) -> dict[Window, float]:
    """The cost of all layers, by their window."""
    return {window: count * cost for window, count in Counter(windows).items()}
