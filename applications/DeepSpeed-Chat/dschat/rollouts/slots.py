# SPDX-License-Identifier: Apache-2.0
"""Keys, values and attention masks of the rows that are being sampled, in buffers that stay where they are.

A buffer has a slot for each live row and a column for each token. All live rows write into one column at a time, which
moves on with every step; a row begins at its own column, so that what lies left of it is its padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

ALIGNED = {"cuda": 16}  # columns; attention kernels read a mask in pieces, and fail where one begins elsewhere


@dataclass
class Window:
    """The part of the buffers that a forward pass uses."""

    first: int = 0  # slots [first, last)
    last: int = 0
    low: int = 0  # columns [low, end) are read, [start, end) are written
    start: int = 0
    end: int = 0
    column: Tensor | None = None  # (1,) long: the one column of [start, end) that is written

    def set(self, slots: slice[int, int], low: int, start: int, end: int, column: Tensor | None = None) -> None:
        """Says what the next forward pass uses."""
        self.first, self.last, self.low, self.start, self.end = slots.start, slots.stop, low, start, end
        self.column = column


class SlotLayer(CacheLayerMixin):
    """One layer's buffers: keys and values (slots, heads, columns, width)."""

    keys: Tensor
    values: Tensor

    def __init__(self, slots: int, columns: int, span: int | None, window: Window) -> None:
        """Takes the sizes of the buffers, and the window of the forward pass that is under way.

        `span`: tokens that a token sees, itself included, in a sliding-window layer; None: all.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.span, self.is_sliding = span, span is not None
        self._shape, self._window = (slots, columns), window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the buffers, with zeros: what is masked must not be NaN."""
        (slots, columns), states = self._shape, (key_states, value_states)
        self.keys, self.values = (x.new_zeros(slots, x.shape[1], columns, x.shape[3]) for x in states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes new columns, and returns views of what these tokens see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._window
        rows = slice(window.first, window.last)
        new, seen = slice(window.start, window.end), slice(self.low, window.end)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if window.column is None:
                buffer[rows, :, new] = states
            else:
                buffer[rows].index_copy_(2, window.column, states)
        return self.keys[rows, :, seen], self.values[rows, :, seen]

    @property
    def low(self) -> int:
        """The first column that is read."""
        window = self._window
        low = window.low if self.span is None else max(window.low, window.start - self.span + 1)
        return low if window.column is None else low - low % ALIGNED["cuda"]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of columns that are read, counted from column 0."""
        return self._window.end - self.low, 0

    def get_seq_length(self) -> int:
        """Columns that are read and were there before."""
        return self._window.start - self.low

    def get_max_length(self) -> int:
        """Columns of the buffers."""
        return self._shape[1]


class StepLayer:
    """One layer's keys and values in a decoding step of fixed shapes: all that a compiled layer reads of the cache.

    A compiled graph holds for all tensors of the same kind, but only for the numbers and objects that it has seen.
    So there are no slots, columns and layer numbers here: the views begin where the step reads.
    """

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        """Takes the views (rows, heads, columns, width) that the step reads, and the column (1,) that it writes."""
        self._keys = keys
        self._values = values
        self._column = column

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one column; returns what the new token sees, which the mask narrows down."""
        self._keys.index_copy_(2, self._column, key_states)
        self._values.index_copy_(2, self._column, value_states)
        return self._keys, self._values


class SlotCache(Cache):
    """The buffers of all layers."""

    step_layers: list[StepLayer] | None = None  # for compiled layers, inside `layer_by_layer`
    merges_linears = False  # whether compiled layers may compute linear layers of one input as one

    def __init__(self, config: PreTrainedConfig, slots: int, columns: int) -> None:
        """Makes no buffers yet: a layer's first keys and values decide their types and widths."""
        self.window = Window()
        kinds = get_layer_types_and_kwargs(config)[0]
        spans = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self.slot_layers = [SlotLayer(slots, columns, span, self.window) for span in spans]
        super().__init__(layers=list(self.slot_layers))

    def move(self, source: Tensor, target: Tensor, columns: slice[int, int]) -> None:
        """Copies columns of some slots (n,) into other slots (n,)."""
        for buffer in self._buffers():
            buffer[target, :, columns] = buffer[source, :, columns]

    def shift(self, slots: int, columns: slice[int, int], distance: int) -> None:
        """Moves columns of the first slots to the left."""
        for buffer in self._buffers():
            moved = buffer[:slots, :, columns].clone()
            buffer[:slots, :, columns.start - distance : columns.stop - distance] = moved

    def clear(self, slots: slice[int, int], columns: slice[int, int]) -> None:
        for buffer in self._buffers():
            buffer[slots, :, columns] = 0

    @contextmanager
    def layer_by_layer(self) -> Iterator[None]:
        """Inside, compiled layers get their parts of the step that the window describes, one `StepLayer` each."""
        window = self.window
        assert window.column is not None
        rows = slice(window.first, window.last)
        column_from = {low: window.column - low for low in {layer.low for layer in self.slot_layers}}
        self.step_layers = []
        for layer in self.slot_layers:
            seen = slice(layer.low, window.end)
            # Without .data, a graph would hold for buffers of the same size only: it looks at what a view is of.
            keys = layer.keys[rows, :, seen].data
            values = layer.values[rows, :, seen].data
            self.step_layers.append(StepLayer(keys, values, column_from[layer.low]))
        try:
            yield
        finally:
            self.step_layers = None

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self.slot_layers for buffer in (layer.keys, layer.values)]


class StepMasks:
    """Which columns of its slot a row's next token sees: those from the row's first token on."""

    def __init__(self, config: PreTrainedConfig, cache: SlotCache, is_additive: bool = True) -> None:
        """Takes the language model's config, which decides the form of masks: with ``layer_types`` there is one for
        each type.

        `is_additive`: masks are added to the attention's logits; otherwise they are True where a column is seen, as
        flash attention reads them.
        """
        self._cache = cache
        self._is_additive = is_additive
        self._types: list[str] | None = getattr(config, "layer_types", None)
        self._mask = torch.empty(0)

    def update(self, first: Tensor) -> None:
        """Takes the column (n,) of each live row's first token; to be called whenever rows or their columns change."""
        keys = self._cache.slot_layers[0].keys
        seen = torch.arange(keys.shape[2], device=keys.device) >= first[:, None]
        self._mask = self._additive(seen) if self._is_additive else seen

    def of_step(self) -> Tensor | dict[str, Tensor]:
        """The model's ``attention_mask`` for the cache's window; on a CPU without copying."""
        if not self._is_additive:
            return self._columns_from(self._cache.window.low)
        return self._by_type(lambda layer: self._columns_from(layer.low))

    def of_static_step(self, first: Tensor, column: Tensor) -> Tensor | dict[str, Tensor]:
        """The same where the device alone knows the `column` (1,) long that is written, in every step anew; `first`
        (n,) long is the column of each row's first token.
        """
        columns = torch.arange(self._cache.window.end, device=first.device)
        seen = (columns >= first[:, None]) & (columns <= column)

        def seen_by(layer: SlotLayer) -> Tensor:
            within = seen if layer.span is None else seen & (columns > column - layer.span)
            return self._additive(within[:, layer.low :])

        return self._by_type(seen_by)

    def _by_type(self, mask_of: Callable[[SlotLayer], Tensor]) -> Tensor | dict[str, Tensor]:
        layers = self._cache.slot_layers
        if self._types is None:
            return mask_of(layers[0])
        return {name: mask_of(layer) for name, layer in dict(zip(self._types, layers, strict=True)).items()}

    def _additive(self, seen: Tensor) -> Tensor:
        """(n, 1, 1, columns), to be added to the attention's logits."""
        dtype = self._cache.slot_layers[0].keys.dtype
        return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]

    def _columns_from(self, low: int) -> Tensor:
        seen = self._mask[..., low : self._cache.window.end]
        aligned = ALIGNED.get(seen.device.type)
        if aligned is None:
            return seen
        width = seen.shape[-1]
        place = seen.new_empty(*seen.shape[:-1], math.ceil(width / aligned) * aligned)
        return place[..., :width].copy_(seen)
