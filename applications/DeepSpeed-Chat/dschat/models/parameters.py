# SPDX-License-Identifier: Apache-2.0
"""The size of a whole parameter, of which ZeRO 3 leaves this process only a part."""

from typing import Any

import torch


def whole_shape(parameter: Any) -> torch.Size:
    """The shape of the whole weight."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def whole_numel(parameter: Any) -> int:
    """The number of elements of the whole weight."""
    return int(whole_shape(parameter).numel())
