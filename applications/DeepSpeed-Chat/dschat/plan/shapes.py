# SPDX-License-Identifier: Apache-2.0
"""The sizes of a model, from its config alone: the model is made on the meta device, without memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dschat.models.finetuning import EVERYTHING, Finetuning, choose_trained
from dschat.models.opening import FLASH, SDPA, implementation

FUSED = "fused_on_meta"  # our name of an attention whose scores are never held, as flash attention's are not
Kind = Literal["policy", "scalar"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, counted in elements.

    Attributes:
        parameters: all of them.
        trained: those with gradients; fewer with LoRA or of a last layer alone.
        largest: of the largest tensor.
        head: of the output head; 0 of a scalar model, whose head is a row.
        tied: whether the output head is the embedding.
        vocab: V; 0 of a scalar model.
        hidden: H.
        cached: keys and values that a token leaves in the cache, over all layers.
        capped: whether the model soft-caps its logits.
    """

    parameters: int
    trained: int
    largest: int
    head: int
    tied: bool
    vocab: int
    hidden: int
    cached: int
    capped: bool


def meta_model(
    config: PreTrainedConfig,
    kind: Kind,
    dtype: torch.dtype,
    attention: str = SDPA,
    finetuning: Finetuning = EVERYTHING,
) -> Any:
    """A Hugging Face model on the meta device, in training mode.

    Args:
        config: of the model.
        kind: policy: causal LM; scalar: the same with one number instead of logits.
        dtype: of the parameters.
        attention: --attn_implementation.
        finetuning: what of it is trained.
    """
    config = copy.deepcopy(config)
    options = {
        "dtype": dtype,
        "attn_implementation": implementation(SDPA if attention == FLASH else attention, config),
    }
    with torch.device("meta"):
        if kind == "policy":
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        else:
            model = AutoModel.from_config(config, trust_remote_code=False, **options)
            model.score = nn.Linear(model.get_input_embeddings().weight.shape[1], 1, bias=False, dtype=dtype)
        choose_trained(model, finetuning, "the model")
    if model.config._attn_implementation == SDPA or attention == FLASH:
        model.config._attn_implementation = FUSED
    return model.train()


def shape_of(model: Any) -> Shape:
    """The sizes of a model of `meta_model`."""
    config = model.config.get_text_config()
    parameters = list(model.parameters())
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    return Shape(
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        largest=max(p.numel() for p in parameters),
        head=0 if head is None else head.weight.numel(),
        tied=head is not None and head.weight is embedding.weight,
        vocab=0 if head is None else head.weight.shape[0],
        hidden=embedding.weight.shape[1],
        cached=cached_per_token(config),
        capped=bool(getattr(config, "final_logit_softcapping", None)),
    )


def cached_per_token(config: PreTrainedConfig) -> int:
    """Elements of keys and values of one token: 2 × layers × key-value heads × width of a head."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * width)


def _fused_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Query, key and value (B, heads, T, width) → (B, T, heads, width); keeps what flash attention keeps."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    output = attend(query, key, value, 0.0, True, False, scale=scaling)[0]
    return output.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(FUSED, _fused_attention)
