# SPDX-License-Identifier: Apache-2.0
"""Where a Hugging Face model keeps its decoder layers."""

from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel


class DecoderLayers(NamedTuple):
    """A model's decoder layers and the module that holds the list, which also has the last norm and the like."""

    parent: nn.Module
    layers: nn.ModuleList


def find_layers(model: PreTrainedModel) -> DecoderLayers | None:
    """The decoder layers of a model, with or without a head; None if no list has as many as the config says."""
    backbone = getattr(model, model.base_model_prefix, model)
    layer_count = int(model.config.get_text_config().num_hidden_layers)
    for parent in backbone.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == layer_count:
                return DecoderLayers(parent, child)
    return None
