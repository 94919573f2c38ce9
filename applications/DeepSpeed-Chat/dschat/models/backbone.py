# SPDX-License-Identifier: Apache-2.0
"""The last hidden states of a Hugging Face model without its head, for padded rows and for packed ones."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

# Families that take position ids but build their attention masks without them, so packed sequences need a mask.
OWN_MASK = ("opt", "falcon")


def reads_positions(model: nn.Module) -> bool:
    """Whether a Hugging Face model, with or without its head, reads position ids, which separate packed sequences.

    ALiBi models derive positions from the mask; Falcon's take position ids all the same and ignore them.
    """
    uses_alibi = getattr(model.config, "alibi", False)
    return not uses_alibi and "position_ids" in inspect.signature(model.forward).parameters


def position_inputs(model: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """Position ids (B, T) long for a mask (B, T) bool, as keyword arguments of a model; {} if it reads none."""
    if not reads_positions(model):
        return {}
    return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0)}


def packed_inputs(model: Any, position_ids: Tensor) -> dict[str, Tensor]:
    """Keyword arguments of a backbone that keep the packed sequences of a row from attending to each other.

    Args:
        model: a Hugging Face model with a head.
        position_ids: (B, T) long, 0 where a sequence begins.

    Returns:
        The position ids; for families in OWN_MASK also an additive attention_mask (B, 1, T, T).
    """
    if model.config.model_type not in OWN_MASK:
        return {"position_ids": position_ids}
    sequence_index = (position_ids == 0).cumsum(1)
    is_visible = (sequence_index[:, :, None] == sequence_index[:, None, :]).tril()[:, None]
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device)
    mask = mask.masked_fill(~is_visible, torch.finfo(dtype).min)
    return {"position_ids": position_ids, "attention_mask": mask}


def last_hidden_state(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None, packed_positions: Tensor | None = None
) -> Tensor:
    """Hidden states before the head, (B, T, H), padding included.

    Args:
        model: a Hugging Face model with a head.
        input_ids: (B, T) long.
        attention_mask: (B, T) bool, True on real tokens. None if every row begins in the first column: a causal model
            never attends to padding after a token, and attention without a mask is the fastest.
        packed_positions: (B, T) long, 0 where a sequence begins, for rows that pack several; then without a mask.
    """
    backbone = getattr(model, model.base_model_prefix)
    if packed_positions is not None:
        inputs = packed_inputs(model, packed_positions)
        return backbone(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    if attention_mask is None:
        with _rows_are_single_texts():
            return backbone(input_ids=input_ids, use_cache=False).last_hidden_state
    outputs = backbone(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        use_cache=False,
        **position_inputs(backbone, attention_mask),
    )
    return outputs.last_hidden_state


@contextmanager
def _rows_are_single_texts() -> Iterator[None]:
    """Keeps transformers from looking for packed sequences, for which the host would wait for the device."""
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original
