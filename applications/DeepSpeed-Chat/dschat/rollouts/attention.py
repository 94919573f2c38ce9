# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention of one new token without copies of keys and values, for transformers that copies them.

With a mask, a transformers without `pack_gqa` repeats every key and value for each query head of its group. The query
heads of a group can stand in the place of a sequence instead: one token's (rows, heads, 1, width) is
(rows, groups, heads of a group, width), and all of them see the same columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@contextmanager
def grouped_heads() -> Iterator[None]:
    """Inside, sdpa copies no keys and values in decoding."""
    if hasattr(sdpa_attention, "pack_gqa"):  # transformers does it
        yield
        return
    ALL_ATTENTION_FUNCTIONS["sdpa"] = without_copies(ALL_ATTENTION_FUNCTIONS["sdpa"])
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


class Attention(Protocol):
    """A function of transformers' AttentionInterface."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Query (rows, heads, tokens, width), key and value (rows, groups, columns, width) → (rows, tokens, …)."""


def without_copies(attention: Attention) -> Attention:
    """transformers' function for sdpa, where a step of decoding reads keys and values as they are."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        (rows, heads, tokens, width), groups = query.shape, key.shape[1]
        by_group = attention_mask is not None and attention_mask.shape[1] == 1 and options.get("position_bias") is None
        if tokens > 1 or heads == groups or not by_group:
            return attention(module, query, key, value, attention_mask, scaling=scaling, **options)
        packed = query.reshape(rows, groups, heads // groups, width)
        seen = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attention_mask, scale=scaling)
        return seen.reshape(rows, 1, heads, value.shape[-1]), None

    return attend
