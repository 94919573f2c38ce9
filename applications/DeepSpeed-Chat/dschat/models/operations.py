# SPDX-License-Identifier: Apache-2.0
"""Operations and memory traffic that a model's passes require, from its weights and the sequences' lengths.

Operations are multiplications and additions: two per weight and token. Only necessary work counts (Chowdhery et al.
2022, "PaLM", appendix B): no recomputation, padding, norms or embedding look-ups.
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
from dschat.models.parameters import whole_numel, whole_shape

logger = logging.getLogger(__name__)

LAYER_NUMBER = re.compile(r"\.(\d+)\.")
BELOW_LAYERS = -1  # layer number of embeddings and their projections
# Layers whose tokens attend to all previous tokens, or to those in a window.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of one setting in different families

Window = int | None  # maximum number of keys that a token attends to; None: all previous tokens and itself


@dataclass(frozen=True)
class Peaks:
    """A GPU's peak performance."""

    operations_per_second: float  # matrix products
    bytes_per_second: float  # memory traffic, bytes read plus bytes written


@dataclass(frozen=True)
class PassCost:
    """Operations of a pass per token, per key and per target."""

    per_token: float  # of the layers' matrices
    per_key: Mapping[Window, float]  # of attention, for each key that a token attends to, by the layers' window
    per_target: float  # of the output head, for each token whose log-prob is computed

    def operations(self, lengths: Integers, targets: int) -> float:
        """Operations on sequences of these lengths (n,) in tokens, with log-probs of `targets` tokens in total."""
        attention = 0.0
        for window, cost in self.per_key.items():
            attention += cost * seen_keys(lengths, window)
        return self.per_token * float(lengths.sum()) + attention + self.per_target * targets


@dataclass(frozen=True)
class ModelCost:
    """Cost of a model's passes."""

    forward: PassCost
    # A trained weight costs twice its forward pass: gradients of activations and of the weight. A frozen one costs the
    # gradients of activations alone, and nothing below the first layer with trained weights. Attention costs twice its
    # forward pass.
    backward: PassCost
    step_bytes: float | None  # weights that a decoding step reads; None with experts, which are read in part
    cache_bytes: Mapping[Window, float]  # bytes of one key and value in all layers with this window

    def training_operations(self, lengths: Integers, targets: int) -> float:
        """Operations of a forward and a backward pass; see `PassCost.operations`."""
        return self.forward.operations(lengths, targets) + self.backward.operations(lengths, targets)


def seen_keys(lengths: Integers, window: Window = None) -> int:
    """Total number of keys that the tokens of causal sequences attend to, each token's own included.

    A sequence of n tokens has n (n + 1) / 2; with a window of w keys, token t attends to min(t, w).
    """
    within = lengths if window is None else np.minimum(lengths, window)
    return int((within * (within + 1) // 2 + (lengths - within) * within).sum())


def decoding_steps(responses: Integers, slots: int) -> int:
    """Minimum number of steps that sample responses of these lengths (n,) in `slots` slots."""
    longest = int(responses.max(initial=0))
    return max(longest, -(-int(responses.sum()) // slots))


def decoding_bytes(cost: ModelCost, lengths: Lengths, slots: int) -> float | None:
    """Bytes that must be read to sample responses in `slots` slots; None with experts.

    Each of `decoding_steps` reads the weights once. Each response token but the last reads the keys and values that it
    attends to.
    """
    if cost.step_bytes is None:
        return None
    computed = lengths.prompts + np.maximum(lengths.responses - 1, 0)
    cached = 0.0
    for window, size in cost.cache_bytes.items():
        cached += size * (seen_keys(computed, window) - seen_keys(lengths.prompts, window))
    return decoding_steps(lengths.responses, slots) * cost.step_bytes + cached


def cost_of(model: Any) -> ModelCost | None:
    """The cost of a Hugging Face causal LM, classifier or decoder, whose weights may be sharded or on the meta device.

    Attention counts as causal. Experts count in proportion to how many a token passes through.

    Returns:
        None if a layer has no ordinary attention, full or sliding, or the config lacks the number of active experts.
    """
    config = model.config.get_text_config()
    backbone = getattr(model, model.base_model_prefix, model)
    matrices = list(_matrices(backbone))
    windows = _windows(config)
    has_experts = any(matrix.is_expert for matrix in matrices)
    active_share = _active_share(config) if has_experts else 1.0
    if windows is None or not active_share or not isinstance(getattr(config, "num_attention_heads", None), int):
        return None

    # Matrices of the layers.
    first_trained = _first_trained_layer(backbone)
    forward = 0.0
    backward = 0.0
    elements = 0
    for matrix in matrices:
        operations = 2.0 * matrix.elements * (active_share if matrix.is_expert else 1.0)
        forward += operations
        backward += operations * (matrix.is_trained + _passes_gradients(matrix.layer, first_trained))
        elements += matrix.elements

    # Attention, and the output head.
    attention = _attention_operations(config)
    backward_windows = []
    for layer, window in enumerate(windows):
        if _passes_gradients(layer, first_trained):
            backward_windows.append(window)
    head = _head(model)
    head_forward = 2.0 * head.elements
    head_backward = head_forward * (head.is_trained + (first_trained is not None))

    element_size = next(backbone.parameters()).element_size()
    step_bytes = float(element_size * (head.elements + elements))
    cached = 2.0 * element_size * _key_value_width(config)
    return ModelCost(
        forward=PassCost(forward, _by_window(windows, attention), head_forward),
        backward=PassCost(backward, _by_window(backward_windows, 2 * attention), head_backward),
        step_bytes=None if has_experts else step_bytes,
        cache_bytes=_by_window(windows, cached),
    )


def cached_per_token(config: PreTrainedConfig) -> int:
    """Elements of one token's keys and values: 2 × layers × key-value heads × head width."""
    return int(2 * config.num_hidden_layers * _key_value_width(config))


@dataclass(frozen=True)
class _Matrix:
    """A weight matrix that tokens are multiplied with."""

    elements: int
    layer: int  # layer number, or BELOW_LAYERS
    is_trained: bool
    is_expert: bool = False


def _matrices(backbone: nn.Module) -> Iterator[_Matrix]:
    """The matrices of a decoder, in its layers and outside, without embeddings and score head."""
    embeddings = set()
    for module in backbone.modules():
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
    for name, parameter in backbone.named_parameters():
        is_matrix = len(whole_shape(parameter)) >= 2 and not name.endswith("bias")
        if is_matrix and id(parameter) not in embeddings and not name.startswith("score."):
            yield _Matrix(whole_numel(parameter), _layer_of(name), parameter.requires_grad, ".experts." in name)


def _head(model: Any) -> _Matrix:
    """The output head of a causal LM; zero elements for a model without one."""
    output = model.get_output_embeddings()
    if output is None:
        return _Matrix(0, BELOW_LAYERS, is_trained=False)
    return _Matrix(whole_numel(output.weight), BELOW_LAYERS, output.weight.requires_grad)


def _first_trained_layer(backbone: nn.Module) -> int | None:
    """The number of the first layer with trained weights, or BELOW_LAYERS; None if nothing is trained.

    Vectors outside the layers belong to the norm after them.
    """
    layers: list[int] = []
    for name, parameter in backbone.named_parameters():
        layer = _layer_of(name)
        is_norm = layer == BELOW_LAYERS and len(whole_shape(parameter)) < 2
        if parameter.requires_grad and not is_norm and not name.startswith("score."):
            layers.append(layer)
    return min(layers, default=None)


def _passes_gradients(layer: int, first_trained: int | None) -> bool:
    return first_trained is not None and layer >= first_trained


def _layer_of(name: str) -> int:
    number = LAYER_NUMBER.search(f".{name}")
    return BELOW_LAYERS if number is None else int(number[1])


def _windows(config: PreTrainedConfig) -> list[Window] | None:
    """The window of each layer's attention; None if a layer is of another kind."""
    kinds = get_layer_types_and_kwargs(config)[0]
    if not set(kinds) <= ATTENTION_LAYERS:
        return None
    windows: list[Window] = []
    for kind in kinds:
        windows.append(config.sliding_window if kind == "sliding_attention" else None)
    return windows


def _active_share(config: PreTrainedConfig) -> float:
    """The share of the experts that a token passes through; 0 if the config does not say it."""
    active = getattr(config, "num_experts_per_tok", None)
    for name in NUM_EXPERTS:
        total = getattr(config, name, None)
        if active and total:
            return float(active / total)
    return 0.0


def _key_plus_value_width(config: PreTrainedConfig) -> int:
    """Width of a head's key plus that of its value; they differ in latent attention."""
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_width = getattr(config, "qk_head_dim", None) or head_width
    value_width = getattr(config, "v_head_dim", None) or head_width
    return int(key_width + value_width)


def _key_value_width(config: PreTrainedConfig) -> int:
    """Elements of one token's keys in a layer, averaged with those of its values."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1  # Falcon 7B
    return int(heads * _key_plus_value_width(config) / 2)


def _attention_operations(config: PreTrainedConfig) -> float:
    """Operations of a layer per attended key: the products with the query and with the value."""
    return 2.0 * config.num_attention_heads * _key_plus_value_width(config)


def _by_window(windows: Sequence[Window], cost: float) -> dict[Window, float]:
    """The total cost of the layers with each window."""
    return {window: count * cost for window, count in Counter(windows).items()}
