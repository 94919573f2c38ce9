# SPDX-License-Identifier: Apache-2.0
"""Packed rows: the block-diagonal attention mask of several texts in a row, which positions from 0 on tell apart."""

import inspect
from typing import Any

import torch
from torch import Tensor

# Families that read positions, but do not tell the function that makes their masks where texts begin.
OWN_MASK = ("opt", "falcon")


def reads_positions(model: Any) -> bool:
    """Whether a Hugging Face model can be told where texts begin; ALiBi and recurrent families cannot."""
    backbone = getattr(model, model.base_model_prefix)
    return "position_ids" in inspect.signature(backbone.forward).parameters


def packed_inputs(model: Any, position_ids: Tensor) -> dict[str, Tensor]:
    """What a backbone is given for a block-diagonal attention mask over the texts of a row.

    Args:
        model: a Hugging Face model.
        position_ids: (B, T) long, 0 where a text begins.

    Returns:
        position_ids; and, for a family that does not find the texts by them, attention_mask (B, 1, T, T), which is
        added to the attention's logits.
    """
    if model.config.model_type not in OWN_MASK:
        return {"position_ids": position_ids}
    text = (position_ids == 0).cumsum(1)
    allowed = (text[:, :, None] == text[:, None, :]).tril()[:, None]
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
    return {"position_ids": position_ids, "attention_mask": mask}
