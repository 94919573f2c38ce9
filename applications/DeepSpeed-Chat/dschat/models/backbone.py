# SPDX-License-Identifier: Apache-2.0
"""The last hidden states of a Hugging Face model, without its head."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import masking_utils

from dschat.models.packing import packed_inputs
from dschat.models.positions import position_ids


def last_hidden_state(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, packed_positions: Tensor | None = None
) -> Tensor:
    """(B, T, H), padding included.

    Args:
        model: a Hugging Face model with a head.
        input_ids: (B, T) long.
        attention_mask: (B, T) bool, True on real tokens. None where every row begins in the first column: a causal
            model never looks at padding behind a token, and without a mask attention is at its fastest.
        packed_positions: (B, T) long, 0 where a text begins, of rows that hold several; without a mask.
    """
    backbone = getattr(model, model.base_model_prefix)
    if packed_positions is not None:
        inputs = packed_inputs(model, packed_positions)
        return backbone(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    if attention_mask is None:
        with _rows_are_single_texts():
            return backbone(input_ids=input_ids, use_cache=False).last_hidden_state
    positions = position_ids(backbone, attention_mask)
    return backbone(
        input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False, **positions
    ).last_hidden_state


@contextmanager
def _rows_are_single_texts() -> Iterator[None]:
    """Without a mask, transformers would wait for the device to find out whether several texts share a row."""
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
