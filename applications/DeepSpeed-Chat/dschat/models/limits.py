# SPDX-License-Identifier: Apache-2.0
"""How long a text a model can read."""

from typing import Any

from torch import nn

POSITIONS = ("wpe", "position_embeddings", "embed_positions")  # what tables of positions are called


def position_limit(model: Any) -> int | None:
    """Longest input in tokens of a model that looks positions up in a table; None where it computes them.

    Args:
        model: any Hugging Face model.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITIONS:
            first = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa begins behind its pad
            declared = getattr(model.config, "max_position_embeddings", module.num_embeddings)
            return min(module.num_embeddings - first, declared)
    return None
