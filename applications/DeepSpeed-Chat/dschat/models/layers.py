# SPDX-License-Identifier: Apache-2.0
"""Where a Hugging Face model keeps its decoder layers."""

from torch import nn


def layers_of(backbone: nn.Module, count: int) -> tuple[nn.Module | None, nn.ModuleList | None]:
    """The list of a backbone's layers, and the module that holds it; (None, None) where no list has `count` layers."""
    for parent in backbone.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return parent, child
    return None, None
