# SPDX-License-Identifier: Apache-2.0
"""Positions counted over real tokens, so that padding on either side changes nothing."""

import inspect

from torch import Tensor, nn


def position_ids(backbone: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """The ``position_ids`` argument for a backbone that takes one, else nothing (ALiBi models derive their own).

    Args:
        backbone: a Hugging Face base model.
        attention_mask: (B, T) bool.

    Returns:
        {"position_ids": (B, T) long} or {}.
    """
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0)}
