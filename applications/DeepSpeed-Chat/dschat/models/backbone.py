# SPDX-License-Identifier: Apache-2.0
"""The last hidden states of a Hugging Face model without its head, for padded rows and for packed ones."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

# Families that read positions, but do not tell the function that makes their masks, which would see where texts begin.
OWN_MASK = ("opt", "falcon")


def position_ids(backbone: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """{"position_ids": (B, T) long} of a mask (B, T) bool, for a backbone that takes them; {} for ALiBi models, which
    derive their own.
    """
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0)}


def reads_positions(model: Any) -> bool:
    """Whether a Hugging Face model can be told where texts begin; ALiBi and recurrent families cannot."""
    backbone = getattr(model, model.base_model_prefix)
    return "position_ids" in inspect.signature(backbone.forward).parameters


def packed_inputs(model: Any, position_ids: Tensor) -> dict[str, Tensor]:
    """What a backbone is given so that the texts of a row do not see each other; `position_ids` (B, T) long are 0
    where a text begins.

    For a family that does not find the texts by them, also attention_mask (B, 1, T, T), added to the attention's
    logits.
    """
    if model.config.model_type not in OWN_MASK:
        return {"position_ids": position_ids}
    text = (position_ids == 0).cumsum(1)
    sees = (text[:, :, None] == text[:, None, :]).tril()[:, None]
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)
    return {"position_ids": position_ids, "attention_mask": mask}


def last_hidden_state(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, packed_positions: Tensor | None = None
) -> Tensor:
    """(B, T, H) of a Hugging Face model with a head, padding included.

    `attention_mask` (B, T) is True on real tokens; None where every row begins in the first column: a causal model
    never looks at padding behind a token, and without a mask attention is at its fastest. `packed_positions` (B, T)
    long, 0 where a text begins, are of rows that hold several; without a mask.
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
