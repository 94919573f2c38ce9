# SPDX-License-Identifier: Apache-2.0
"""A decoding step of fixed shapes, which CUDA graphs can replay.

The live rows are computed with as many others as fill up a bucket of rows; they see the columns from 0 on up to the
next multiple of COLUMN_STEP, of which a mask shows those of their row. What changes from step to step is in tensors
that stay where they are, so that one step of a bucket is the same list of kernels on the same addresses as the next.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from dschat.models.layout import COLUMN_STEP
from dschat.models.opening import PLAIN_ATTENTION
from dschat.rollouts.attention import one_token_attention
from dschat.rollouts.decoder import Capacity, Decoder, Sample
from dschat.rollouts.sampling import Sampling, TokenSampler
from dschat.run.distributed import is_main

logger = logging.getLogger(__name__)

ROW_STEP = 8  # the rows of a step are a multiple of it, from twice as many on; fewer rows are a power of two
# Operators whose result's shape or value the host must know.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
WAITING |= {"bincount", "repeat_interleave"}


class Operator(Protocol):
    """One of PyTorch's, as a dispatch mode meets it."""

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class HostSyncs(TorchDispatchMode):
    """Notes operators for which the host waits for the device, and which a graph therefore cannot hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]  # aten.copy_.default
        if name in WAITING or _indexes_by_mask(name, args) or _crosses_devices(name, args, result):
            self.found.append(name)
        return result


def host_syncs(step: Callable[[], None], device: torch.device) -> set[str]:
    """Runs a step; the operators for which the host waits for the device.

    On a GPU PyTorch also warns of those inside of operators, as where experts of a mixture are counted on the host.
    """
    with HostSyncs() as syncs, warnings.catch_warnings(record=True) as warned, _told_of_waiting(device):
        warnings.simplefilter("always")
        step()
    inside = any("synchronizing CUDA operation" in str(warning.message) for warning in warned)
    return {*syncs.found, *(["something inside of an operator"] if inside and not syncs.found else [])}


@contextmanager
def _told_of_waiting(device: torch.device) -> Iterator[None]:
    """Inside, PyTorch warns where the host waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _indexes_by_mask(name: str, args: Sequence[object]) -> bool:
    """Whether True in a mask says what is meant: as many numbers as there are."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    indices = cast("Sequence[Tensor | None]", args[1])
    return any(index is not None and index.dtype == torch.bool for index in indices)


def _crosses_devices(name: str, args: Sequence[object], result: object) -> bool:
    if name not in ("_to_copy", "copy_"):
        return False
    places = {tensor.device.type for tensor in (*args[:2], result) if isinstance(tensor, Tensor)}
    return len(places) > 1


class LateCopy:
    """A copy of a device's tensor that the host asks for now and reads later, so that the device has gone on."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, cuda = tensor, tensor.device.type == "cuda"
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=cuda)
        self._done = torch.cuda.Event() if cuda else None

    def ask(self) -> None:
        """The tensor as it will be when the device has done what it was given so far."""
        self._copy.copy_(self._tensor, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def read(self) -> list[bool]:
        """What was asked for last."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()


class StaticDecoder(Decoder):
    """A decoder for many rollouts, as long as the model's weights stay where they are."""

    def __init__(self, causal_lm: PreTrainedModel, capacity: Capacity) -> None:
        super().__init__(causal_lm, replace(capacity, columns=round_up(capacity.columns, COLUMN_STEP)))
        self._addresses = addresses_of(causal_lm)
        self._column = torch.zeros(1, dtype=torch.long, device=self._device)  # that was filled last
        self._steps: dict[tuple[Sampling, int, int], Callable[[], None]] = {}
        on_gpu = self._device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._late = LateCopy(self.ended)
        self._sample: Sample = TokenSampler.__call__
        if self._compiler is not None:
            self._sample = self._compiler.compile(self._sample)
            self.cache.merges_linears = self._compiler.may_merge()
        self.refusal: str | None = None  # why the model's step cannot be captured
        if causal_lm.config._attn_implementation not in PLAIN_ATTENTION and not causal_lm._supports_attention_backend:
            self._refuse("its attention may read the rows' lengths on the host")

    def serves(self, causal_lm: PreTrainedModel, capacity: Capacity) -> bool:
        """Whether it can draw from a model as it is now."""
        return self._model is causal_lm and self.is_valid() and self.capacity.holds(capacity)

    def is_valid(self) -> bool:
        """Whether the model's weights are where they were, which its graphs read."""
        return self._addresses == addresses_of(self._model)

    @property
    def launches(self) -> str:
        """How steps are launched, in words."""
        if self.refusal is not None:
            return f"launched one by one: {self.refusal}"
        return "of fixed shapes" if self._pool is None else "CUDA graphs"

    def rows_changed(self, live: int, end: int) -> None:
        super().rows_changed(live, end)
        for state in (self.drawn, self.position, self.first):
            state[live:] = 0
        self.number[live:] = self.capacity.prompts
        self._column.fill_(end - 1)
        self._late.ask()

    def step(self, live: int, low: int, end: int) -> None:
        if self.refusal is not None:
            super().step(live, low, end)
            return
        rows = min(rows_of_step(live), self._used)
        key = (self._sampling, rows, round_up(end + 1, COLUMN_STEP))
        if key in self._steps:
            self._steps[key]()
            return
        step = partial(self._static_step, *key[1:])
        self._look_at(step)
        if self.refusal is not None:
            super().step(live, low, end)
            return
        step()  # compiles, which must not happen while a graph is captured
        self._keep(key, step)

    def _look_at(self, step: Callable[[], None]) -> None:
        """Refuses to capture steps in which the host waits for the device. Nothing is drawn yet.

        The step runs uncompiled and is then taken back: what it has written of tokens, keys and values is written
        again by the next step, so that a run that goes on from a checkpoint draws what it would have drawn.
        """
        states = (self._column, self.position, self.id, self.ended, self.drawn)
        before = [state.clone() for state in states]
        with self._uncompiled():
            waited_for = host_syncs(step, self._device)
        for state, value in zip(states, before, strict=True):
            state.copy_(value)
        if waited_for:
            self._refuse(f"the host waits for {', '.join(sorted(waited_for))}")

    def _keep(self, key: tuple[Sampling, int, int], step: Callable[[], None]) -> None:
        """Keeps what replays a step, unless such steps cannot be captured."""
        captured = step if self._pool is None else self._capture(step)
        if captured is not None:
            self._steps[key] = captured

    def ended_slots(self, live: int) -> list[bool]:
        """Which of the first slots' rows had ended when this was called last, or the rows changed."""
        ended = self._late.read()[:live]
        self._late.ask()
        return ended

    def move(self, sources: Sequence[int], targets: Sequence[int], columns: slice[int, int]) -> None:
        """See `Decoder`; all columns move, since a step reads them all."""
        super().move(sources, targets, slice(0, self.capacity.columns))

    def _clear(self, rows: slice[int, int], low: int, start: int) -> None:
        if self.cache.is_initialized:
            super()._clear(rows, 0, self.capacity.columns)

    def _static_step(self, rows: int, columns: int) -> None:
        """Draws the next token of the first rows, which see columns [0, columns) as far as their mask shows them."""
        slots = slice(0, rows)
        self._column += 1
        self.position[slots] += 1
        self.cache.window.set(slots, low=0, start=columns - COLUMN_STEP, end=columns, column=self._column)
        mask = self._masks.of_static_step(self.first[slots], self._column)
        with one_token_attention(self._model), self.cache.layer_by_layer():
            logits = self._forward(slots, self.id[slots, None].data, self.position[slots, None].data, mask)
        self._draw(slots, logits, self._sample)

    def _capture(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """A graph's `replay`; None where there can be none."""
        assert self._pool is not None
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            # What torch.cuda.graph leaves behind when it fails: its stream, and an allocator that is still recording.
            torch.cuda.set_stream(before)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(before.device_index, self._pool)
            self._refuse(str(error).splitlines()[0])
            return None
        return graph.replay

    def _refuse(self, why: str) -> None:
        self.refusal = why
        self._steps.clear()
        if is_main():
            told = "decoding steps of %s cannot be captured as CUDA graphs: %s. They are launched one by one."
            logger.warning(told, self._model.config.model_type, why)


def addresses_of(model: nn.Module) -> tuple[int, ...]:
    """Where the weights and buffers lie."""
    return tuple(tensor.data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers()))


def rows_of_step(live: int) -> int:
    """The bucket of so many rows: 2, 4, 8, 16, 24, 32, …; a graph of one row alone would be compiled anew."""
    return round_up(live, ROW_STEP) if live > ROW_STEP else max(2, 1 << (live - 1).bit_length())


def round_up(number: int, step: int) -> int:
    """The next multiple of step."""
    return -(-number // step) * step
