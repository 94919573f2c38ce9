# SPDX-License-Identifier: Apache-2.0
"""Operations and memory traffic of a model's passes, from its number of weights.

The usual estimate (Chowdhery et al. 2022, "PaLM", appendix B): a forward and a backward pass take 6·N + 12·L·H·S
operations per token, for N weights, L layers whose attention heads are H wide together, and sequences of S tokens. A
third of them belongs to the forward pass. N holds the output head, as if logits were computed at every token;
recomputation and padding do not count. A frozen weight has no gradient of its own: it counts 4 instead of 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from dschat.models.layout import Integers, Lengths
from dschat.models.parameters import whole_numel

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of one setting in different families


@dataclass(frozen=True)
class ModelCost:
    """The sizes of a model that its operations and memory traffic follow from."""

    weights: int  # N: weights that tokens are multiplied with; an embedding counts if it is also the output head
    trained: int  # those of them that have a gradient
    attention: int  # L · H; where a head's key and value differ in width, their mean counts
    cached: int  # elements of one token's keys and values
    width: int  # bytes per element

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decoding step reads of the weights."""
        return self.width * self.weights

    def forward_operations(self, lengths: Integers) -> float:
        """2·N + 4·L·H·S per token, for sequences of these lengths S (n,) in tokens."""
        return 2.0 * self.weights * float(lengths.sum()) + 4.0 * self.attention * _sum_of_squares(lengths)

    def training_operations(self, lengths: Integers) -> float:
        """6·N + 12·L·H·S per token if all weights are trained, for sequences of these lengths S (n,) in tokens."""
        per_token = 4.0 * self.weights + 2.0 * self.trained
        return per_token * float(lengths.sum()) + 12.0 * self.attention * _sum_of_squares(lengths)


def _sum_of_squares(lengths: Integers) -> float:
    return float(np.square(lengths.astype(np.float64)).sum())


def cost_of(model: Any) -> ModelCost | None:
    """The cost of a Hugging Face causal LM, classifier or decoder, whose weights may be sharded or on the meta device.

    None for a mixture of experts, which uses a part of its weights for each token.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in NUM_EXPERTS):
        return None
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    is_head = head is not None and head.weight is embedding
    weights = 0
    trained = 0
    for parameter in model.parameters():
        if parameter is not embedding or is_head:
            weights += whole_numel(parameter)
            trained += whole_numel(parameter) if parameter.requires_grad else 0
    key_width, value_width = _head_widths(config)
    return ModelCost(
        weights=weights,
        trained=trained,
        attention=config.num_hidden_layers * config.num_attention_heads * (key_width + value_width) // 2,
        cached=cached_per_token(config),
        width=embedding.element_size(),
    )


def decoding_steps(responses: Integers, slots: int) -> int:
    """Minimum number of steps that sample responses of these lengths (n,) in `slots` slots."""
    longest = int(responses.max(initial=0))
    return max(longest, -(-int(responses.sum()) // slots))


def decoding_bytes(cost: ModelCost, lengths: Lengths, slots: int) -> float:
    """Bytes that must be read to sample responses in `slots` slots.

    Each of `decoding_steps` reads the weights once. Each response token but the last reads the keys and values of all
    tokens up to itself.
    """
    computed = lengths.prompts + np.maximum(lengths.responses - 1, 0)
    keys = int((computed * (computed + 1) // 2 - lengths.prompts * (lengths.prompts + 1) // 2).sum())
    steps = decoding_steps(lengths.responses, slots)
    return float(steps * cost.weight_bytes + keys * cost.cached * cost.width)


def cached_per_token(config: PreTrainedConfig) -> int:
    """Elements of one token's keys and values: layers × key-value heads × (width of a key + width of a value)."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1  # Falcon 7B
    key_width, value_width = _head_widths(config)
    return int(config.num_hidden_layers * heads * (key_width + value_width))


def _head_widths(config: PreTrainedConfig) -> tuple[int, int]:
    """Widths of a head's key and value, which differ in latent attention."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    key_width = getattr(config, "qk_head_dim", None) or width
    value_width = getattr(config, "v_head_dim", None) or width
    return key_width, value_width
