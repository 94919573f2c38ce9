# SPDX-License-Identifier: Apache-2.0
"""Attention for decoding, one new token per row, that reads each key and value once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dschat.models.attention import use_attention

ONE_TOKEN = "one_token"  # the name of `attend_by_products` among transformers' attention functions


def attend_by_products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of one token per row by two matrix products over each group of query heads.

    Fused kernels use one thread block per row and head, which leaves most of a GPU idle when a row has one token;
    matrix products spread over the columns as well.

    Args:
        module: the attention layer; not used.
        query: (rows, heads, 1, width).
        key, value: (rows, groups, columns, width).
        attention_mask: (rows, 1, 1, columns), added to the logits.
        scaling: scaling of the logits; 1 / √width if None.
        softcap: logits are capped at ±softcap, as in Gemma 2.
        s_aux: (heads,) logits of an additional column without a value, as in gpt-oss.
        options: not used.

    Returns:
        (rows, 1, heads, width) in the query's dtype, and no weights.
    """
    rows, heads, _, width = query.shape
    groups = key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    packed = query.reshape(rows, groups, heads // groups, width)
    logits = torch.matmul(packed, key.transpose(2, 3)).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + attention_mask.float()
    if s_aux is not None:
        sinks = s_aux.float().reshape(1, groups, heads // groups, 1).expand(rows, -1, -1, -1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    attended = torch.matmul(weights.to(value.dtype), value)
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


ALL_ATTENTION_FUNCTIONS.register(ONE_TOKEN, attend_by_products)


def one_token_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, a model computes attention by `attend_by_products`, unless its attention cannot be exchanged.

    Its forward passes must have one token per row, and prepared additive masks.
    """
    if not model._supports_attention_backend:
        return nullcontext()
    return use_attention(ONE_TOKEN, model.config)
