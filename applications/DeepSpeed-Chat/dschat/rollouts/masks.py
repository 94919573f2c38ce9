# SPDX-License-Identifier: Apache-2.0
"""Attention masks of one new token per row, kept from step to step instead of made anew."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dschat.rollouts.slots import SlotCache

ALIGNED = {"cuda": 16}  # columns; attention kernels read a mask in pieces, and fail where one begins elsewhere


class StepMasks:
    """Which columns of its slot a row's next token sees: those from the row's first token on."""

    def __init__(self, config: PreTrainedConfig, cache: SlotCache) -> None:
        """Takes what decides the form of masks.

        Args:
            config: of the language model; models with ``layer_types`` take a mask for each type.
            cache: whose layers the masks are for.
        """
        self._cache = cache
        self._implementation: str = config._attn_implementation
        self._types: list[str] | None = getattr(config, "layer_types", None)
        self._mask = torch.empty(0)

    def update(self, starts: Sequence[int]) -> None:
        """Takes the column of each live row's first token; to be called whenever the rows or their columns change."""
        keys = self._cache.slot_layers[0].keys
        first = torch.tensor(starts, device=keys.device)
        seen = torch.arange(keys.shape[2], device=keys.device) >= first[:, None]
        if not self._implementation.startswith("flash"):
            seen = torch.where(seen, 0.0, torch.finfo(keys.dtype).min).to(keys.dtype)[:, None, None]
        self._mask = seen

    def of_step(self) -> Tensor | dict[str, Tensor]:
        """The model's ``attention_mask`` for the cache's window; on a CPU without copying."""
        if self._implementation.startswith("flash"):
            return self._columns_from(self._cache.window.low)
        if self._types is None:
            return self._columns_from(self._cache.slot_layers[0].low)
        layers = zip(self._types, self._cache.slot_layers, strict=True)
        return {name: self._columns_from(low) for name, low in {name: layer.low for name, layer in layers}.items()}

    def _columns_from(self, low: int) -> Tensor:
        seen = self._mask[..., low : self._cache.window.end]
        aligned = ALIGNED.get(seen.device.type)
        if aligned is None:
            return seen
        width = seen.shape[-1]
        place = seen.new_empty(*seen.shape[:-1], math.ceil(width / aligned) * aligned)
        return place[..., :width].copy_(seen)
