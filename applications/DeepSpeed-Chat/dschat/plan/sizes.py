# SPDX-License-Identifier: Apache-2.0
"""A model on the meta device, from its config: numbers of its parameters, its head, and what its passes cost."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dschat.models.attention import PLAIN_ATTENTION, SDPA, resolve_attention
from dschat.models.finetuning import EVERYTHING, Finetuning, choose_trained, train_top_layers
from dschat.models.limits import position_limit
from dschat.models.operations import ModelCost, cached_per_token, cost_of

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
