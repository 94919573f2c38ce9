# SPDX-License-Identifier: Apache-2.0
"""A decoding step of fixed shapes, which CUDA graphs can replay.

The number of rows is rounded up to a bucket. Rows read the columns from 0 to the next multiple of COLUMN_STEP, and a
mask hides those that are not theirs. Everything that changes from step to step is in tensors with fixed addresses, so
that each step of a bucket launches the same kernels on the same addresses.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.models.attention import PLAIN_ATTENTION
from dschat.models.layout import COLUMN_STEP, round_up
from dschat.rollouts.attention import one_token_attention
from dschat.rollouts.decoder import Capacity, Decoder, SampleTokens
from dschat.rollouts.sampling import Sampling, TokenSampler
from dschat.run.distributed import is_main

logger = logging.getLogger(__name__)

ROW_STEP = 8  # more rows than this are rounded up to a multiple of it, fewer to a power of two


def waits_for_device(step: Callable[[], None], device: torch.device) -> bool:
    """Runs a step; whether the host waited in it for the GPU, of which PyTorch then warns. A graph cannot do that."""
    with warnings.catch_warnings(record=True) as caught, _sync_warnings(device):
        warnings.simplefilter("always")
        step()
    return any("synchronizing CUDA operation" in str(warning.message) for warning in caught)


@contextmanager
def _sync_warnings(device: torch.device) -> Iterator[None]:
    """Inside, PyTorch warns whenever the host waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class DeferredCopy:
    """A copy of a device's tensor that the host requests now and reads later, while the device continues."""

    def __init__(self, tensor: Tensor) -> None:
        on_gpu = tensor.device.type == "cuda"
        self._tensor = tensor
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None

    def request(self) -> None:
        """Copies the tensor once the device has done its work so far."""
        self._copy.copy_(self._tensor, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def read(self) -> list[bool]:
        """The copy that was requested last."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()


class StaticDecoder(Decoder):
    """A decoder for many rollouts, as long as the model's weights keep their addresses."""

    def __init__(self, causal_lm: PreTrainedModel, capacity: Capacity) -> None:
        columns = round_up(capacity.columns, COLUMN_STEP)
        super().__init__(causal_lm, replace(capacity, columns=columns))
        self._addresses = addresses_of(causal_lm)
        self._column = torch.zeros(1, dtype=torch.long, device=self._device)  # the one that was filled last
        self._steps: dict[tuple[Sampling, int, int], Callable[[], None]] = {}  # by sampling, rows and columns
        on_gpu = self._device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._ended_copy = DeferredCopy(self.ended)
        self._token_sampler: SampleTokens = TokenSampler.__call__
        if self._compiler is not None:
            self._token_sampler = self._compiler.compile(self._token_sampler)
            self.cache.merges_linears = self._compiler.may_merge()
        self.refusal: str | None = None  # why the model's step cannot be captured
        if causal_lm.config._attn_implementation not in PLAIN_ATTENTION and not causal_lm._supports_attention_backend:
            self._refuse("its attention may read the rows' lengths on the host")

    def serves(self, causal_lm: PreTrainedModel, capacity: Capacity) -> bool:
        """Whether it can sample from a model in its current state."""
        return self._model is causal_lm and self.is_valid() and self.capacity.holds(capacity)

    def is_valid(self) -> bool:
        """Whether the model's weights still have the addresses that the graphs read."""
        return self._addresses == addresses_of(self._model)

    @property
    def launches(self) -> str:
        """How steps are launched, for run.json and the log."""
        if self.refusal is not None:
            return f"launched one by one: {self.refusal}"
        return "of fixed shapes" if self._pool is None else "CUDA graphs"

    def rows_changed(self, live: int, end: int) -> None:
        super().rows_changed(live, end)
        for state in (self.sampled, self.position, self.first):
            state[live:] = 0
        self.number[live:] = self.capacity.prompts
        self._column.fill_(end - 1)
        self._ended_copy.request()

    def step(self, live: int, low: int, end: int) -> None:
        if self.refusal is not None:
            super().step(live, low, end)
            return
        rows = min(rows_of_step(live), self._used_slots)
        columns = round_up(end + 1, COLUMN_STEP)
        key = (self._sampling, rows, columns)
        if key in self._steps:
            self._steps[key]()
            return
        step = partial(self._static_step, rows, columns)
        self._check_capturable(step)
        if self.refusal is not None:
            super().step(live, low, end)
            return
        step()  # compiles, which must not happen while a graph is captured
        captured = step if self._pool is None else self._capture(step)
        if captured is not None:
            self._steps[key] = captured

    def _check_capturable(self, step: Callable[[], None]) -> None:
        """Refuses to capture steps in which the host waits for the device.

        The step runs uncompiled and is then undone: the next step writes the same tokens, keys and values again, so
        that a run that continues from a checkpoint samples what it would have sampled.
        """
        states = (self._column, self.position, self.id, self.ended, self.sampled)
        before = [state.clone() for state in states]
        with self._uncompiled():
            waits = waits_for_device(step, self._device)
        for state, value in zip(states, before, strict=True):
            state.copy_(value)
        if waits:
            self._refuse("the host waits for the GPU")

    def ended_slots(self, live: int) -> list[bool]:
        """Which of the first `live` slots had ended at the last call, or when the rows changed last."""
        ended = self._ended_copy.read()[:live]
        self._ended_copy.request()
        return ended

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: slice[int, int]) -> None:
        """See `Decoder.move`; copies all columns, since a step reads them all."""
        super().move(sources, targets, slice(0, self.capacity.columns))

    def _clear(self, rows: slice[int, int], low: int, start: int) -> None:
        if self.cache.is_initialized:
            super()._clear(rows, 0, self.capacity.columns)

    def _static_step(self, rows: int, columns: int) -> None:
        """Samples the next token of the first rows, which read columns [0, columns) and see those of their mask."""
        slots = slice(0, rows)
        self._column += 1
        self.position[slots] += 1
        start = columns - COLUMN_STEP
        self.cache.window.set(slots, read_start=0, write_start=start, end=columns, column=self._column)
        mask = self._masks.of_static_step(self.first[slots], self._column)
        input_ids = self.id[slots, None].data
        positions = self.position[slots, None].data
        with one_token_attention(self._model), self.cache.step_views():
            logits = self._forward(slots, input_ids, positions, mask)
        self._sample_tokens(slots, logits, self._token_sampler)

    def _capture(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """Captures a step as a CUDA graph; returns its `replay`, or None if it cannot be captured."""
        assert self._pool is not None
        graph = torch.cuda.CUDAGraph()
        stream_before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            # When torch.cuda.graph fails it leaves its stream set, and the allocator recording.
            torch.cuda.set_stream(stream_before)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream_before.device_index, self._pool)
            self._refuse(str(error).splitlines()[0])
            return None
        return graph.replay

    def _refuse(self, reason: str) -> None:
        """Launches steps one by one from now on."""
        self.refusal = reason
        self._steps.clear()
        if is_main():
            logger.warning(
                "decoding steps of %s cannot be captured as CUDA graphs: %s. They are launched one by one.",
                self._model.config.model_type,
                reason,
            )


def addresses_of(model: nn.Module) -> tuple[int, ...]:
    """Addresses of the weights and buffers."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return tuple(tensor.data_ptr() for tensor in tensors)


def rows_of_step(live: int) -> int:
    """Rounds a number of rows up to its bucket: 2, 4, 8, 16, 24, 32, …; a graph of 1 row would be compiled anew."""
    if live > ROW_STEP:
        return round_up(live, ROW_STEP)
    return max(2, 1 << (live - 1).bit_length())
