# SPDX-License-Identifier: Apache-2.0
"""Keys, values and attention masks of the rows that are being sampled, in preallocated buffers.

A buffer has a slot for each live row and a column for each token. All live rows write into the same column, which
moves on with every step. Each row begins at its own column; the columns to its left are its padding.
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

# Attention kernels of GPUs read a mask in pieces of this many columns, and fail where a piece begins elsewhere.
# Steps of fixed shapes read from such a column on every device, so that a CPU can test them.
COLUMN_ALIGNMENT = 16
ALIGNED_DEVICES = {"cuda"}


@dataclass
class Window:
    """The part of the buffers that a forward pass uses."""

    first_slot: int = 0  # slots [first_slot, end_slot)
    end_slot: int = 0
    read_start: int = 0  # columns [read_start, end) are read
    write_start: int = 0  # columns [write_start, end) are written
    end: int = 0
    column: Tensor | None = None  # (1,) long: in steps of fixed shapes, the one column that is written, instead

    def set(
        self, slots: slice[int, int], read_start: int, write_start: int, end: int, column: Tensor | None = None
    ) -> None:
        """Sets what the next forward pass uses."""
        self.first_slot = slots.start
        self.end_slot = slots.stop
        self.read_start = read_start
        self.write_start = write_start
        self.end = end
        self.column = column


class SlotLayer(CacheLayerMixin):
    """One layer's buffers: keys and values (slots, heads, columns, width)."""

    keys: Tensor
    values: Tensor

    def __init__(self, slots: int, columns: int, span: int | None, window: Window) -> None:
        """Stores the sizes; the first forward pass allocates the buffers.

        Args:
            slots: number of slots.
            columns: number of columns.
            span: in a sliding-window layer, tokens that a token sees, itself included; None: all.
            window: window of the current forward pass.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.span = span
        self.is_sliding = span is not None
        self._slots = slots
        self._columns = columns
        self._window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the buffers, with zeros: masked columns must not be NaN."""
        self.keys = self._zeros_like(key_states)
        self.values = self._zeros_like(value_states)
        self.is_initialized = True

    def _zeros_like(self, states: Tensor) -> Tensor:
        return states.new_zeros(self._slots, states.shape[1], self._columns, states.shape[3])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes new columns, and returns views of the columns that these tokens see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._window
        rows = slice(window.first_slot, window.end_slot)
        new = slice(window.write_start, window.end)
        seen = slice(self.read_start, window.end)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if window.column is None:
                buffer[rows, :, new] = states
            else:
                buffer[rows].index_copy_(2, window.column, states)
        return self.keys[rows, :, seen], self.values[rows, :, seen]

    @property
    def read_start(self) -> int:
        """The first column that this layer reads."""
        window = self._window
        start = window.read_start
        if self.span is not None:
            start = max(start, window.write_start - self.span + 1)
        if window.column is not None:
            start -= start % COLUMN_ALIGNMENT
        return start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of columns that are read, and the offset of their numbers: 0, as the first one read is number 0."""
        return self._window.end - self.read_start, 0

    def get_seq_length(self) -> int:
        """Columns that are read and were there before."""
        return self._window.write_start - self.read_start

    def get_max_length(self) -> int:
        """Columns of the buffers."""
        return self._columns


class StepLayer:
    """One layer's keys and values in a decoding step of fixed shapes, for compiled layers.

    A compiled graph is valid for all tensors of the same kind, but only for the numbers and objects that it was traced
    with. So this object holds no slots, columns or layer numbers: the views begin where the step reads.
    """

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        """Takes the views (rows, heads, columns, width) that the step reads, and the column (1,) that it writes."""
        self._keys = keys
        self._values = values
        self._column = column

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one column; returns the columns that the new token may see, subject to the mask."""
        self._keys.index_copy_(2, self._column, key_states)
        self._values.index_copy_(2, self._column, value_states)
        return self._keys, self._values


class SlotCache(Cache):
    """The buffers of all layers."""

    step_layers: list[StepLayer] | None = None  # for compiled layers, inside `step_views`
    merges_linears = False  # whether compiled layers may compute linear layers of one input as one

    def __init__(self, config: PreTrainedConfig, slots: int, columns: int) -> None:
        """Allocates no buffers yet: a layer's first keys and values decide their types and widths."""
        self.window = Window()
        self.slot_layers: list[SlotLayer] = []
        for layer_type in get_layer_types_and_kwargs(config)[0]:
            span = config.sliding_window if layer_type == "sliding_attention" else None
            self.slot_layers.append(SlotLayer(slots, columns, span, self.window))
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
        """Sets columns of some slots to zero."""
        for buffer in self._buffers():
            buffer[slots, :, columns] = 0

    @contextmanager
    def step_views(self) -> Iterator[None]:
        """Inside, each compiled layer gets a `StepLayer` with the part of its buffers that the window describes."""
        window = self.window
        assert window.column is not None
        rows = slice(window.first_slot, window.end_slot)
        column_by_start: dict[int, Tensor] = {}  # the written column, counted from the first one that is read
        self.step_layers = []
        for layer in self.slot_layers:
            start = layer.read_start
            if start not in column_by_start:
                column_by_start[start] = window.column - start
            # `.data` detaches a view from its buffer: torch.compile would make a graph for each size of the buffer.
            keys = layer.keys[rows, :, start : window.end].data
            values = layer.values[rows, :, start : window.end].data
            self.step_layers.append(StepLayer(keys, values, column_by_start[start]))
        try:
            yield
        finally:
            self.step_layers = None

    def _buffers(self) -> list[Tensor]:
        buffers = []
        for layer in self.slot_layers:
            buffers += [layer.keys, layer.values]
        return buffers


class StepMasks:
    """Attention masks of a step: a row's next token sees the columns from the row's first token on."""

    def __init__(self, config: PreTrainedConfig, cache: SlotCache, is_additive: bool = True) -> None:
        """Stores what decides the form of the masks.

        Args:
            config: config of the language model; with ``layer_types`` there is a mask for each type.
            cache: whose window the masks are for.
            is_additive: masks are added to the attention's logits; otherwise they are True if a column is seen, as
                flash attention reads them.
        """
        self._cache = cache
        self._is_additive = is_additive
        self._types: list[str] | None = getattr(config, "layer_types", None)
        self._mask = torch.empty(0)

    def update(self, first_columns: Tensor) -> None:
        """Sets the column (n,) of each live row's first token; to be called whenever rows or their columns change."""
        keys = self._cache.slot_layers[0].keys
        columns = torch.arange(keys.shape[2], device=keys.device)
        seen = columns >= first_columns[:, None]
        self._mask = self._additive(seen) if self._is_additive else seen

    def of_step(self) -> Tensor | dict[str, Tensor]:
        """The model's ``attention_mask`` for the cache's window; on a CPU without copying."""
        if not self._is_additive:
            return self._columns_from(self._cache.window.read_start)
        return self._by_type(lambda layer: self._columns_from(layer.read_start))

    def of_static_step(self, first_columns: Tensor, column: Tensor) -> Tensor | dict[str, Tensor]:
        """The model's ``attention_mask`` for a step of fixed shapes.

        Args:
            first_columns: column of each row's first token, shape (n,), long.
            column: the column that is written, shape (1,), long; only the device knows its value.
        """
        columns = torch.arange(self._cache.window.end, device=first_columns.device)
        seen = (columns >= first_columns[:, None]) & (columns <= column)

        def seen_by(layer: SlotLayer) -> Tensor:
            in_span = seen if layer.span is None else seen & (columns > column - layer.span)
            return self._additive(in_span[:, layer.read_start :])

        return self._by_type(seen_by)

    def _by_type(self, mask_of: Callable[[SlotLayer], Tensor]) -> Tensor | dict[str, Tensor]:
        layers = self._cache.slot_layers
        if self._types is None:
            return mask_of(layers[0])
        layer_by_type = dict(zip(self._types, layers, strict=True))
        return {name: mask_of(layer) for name, layer in layer_by_type.items()}

    def _additive(self, seen: Tensor) -> Tensor:
        """A mask (n, 1, 1, columns) to add to the attention's logits, from `seen` (n, columns) bool."""
        dtype = self._cache.slot_layers[0].keys.dtype
        mask = torch.where(seen, 0.0, torch.finfo(dtype).min)
        return mask.to(dtype)[:, None, None]

    def _columns_from(self, start: int) -> Tensor:
        seen = self._mask[..., start : self._cache.window.end]
        if seen.device.type not in ALIGNED_DEVICES:
            return seen
        width = seen.shape[-1]
        aligned_width = math.ceil(width / COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
        buffer = seen.new_empty(*seen.shape[:-1], aligned_width)
        return buffer[..., :width].copy_(seen)
