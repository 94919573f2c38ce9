# SPDX-License-Identifier: Apache-2.0
"""Bytes of what a model keeps between passes, on each of N processes: parameters, gradients, optimiser states.

In bf16 and fp16 the optimiser works on a float32 copy of the weights, gradients are added up in float32, and Adam
holds two float32 moments. ZeRO 1 divides the optimiser's part among the processes, 2 the gradients, 3 the weights.
DeepSpeed's stage 0 is used in float32 only: in half precision 1 takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dschat.models.opening import DTYPES

FLOAT32 = 4  # bytes
MOMENTS = 2 * FLOAT32  # of Adam, per weight
# DeepSpeed's defaults, in elements: gradients that are reduced at a time, weights that ZeRO 3 fetches ahead, and those
# that it updates at a time.
REDUCE_BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 1_000_000_000


@dataclass(frozen=True)
class Zero:
    """What a configuration of DeepSpeed says of memory."""

    stage: int = 0  # the one that is used
    offload: bool = False  # the optimiser's part in main memory
    offload_weights: bool = False  # the weights in main memory, at stage 3
    gradient: int = FLOAT32  # bytes of an element of the gradients' sum in half precision
    bucket: int = REDUCE_BUCKET
    live: int = LIVE_PARAMETERS
    group: int = SUB_GROUP

    @classmethod
    def of(cls, settings: Mapping[str, Any], trained: bool = True) -> Zero:
        """Reads what `dschat.settings.deepspeed.deepspeed_settings` gives; a model that is not `trained` has no states
        that could be elsewhere."""
        zero = settings["zero_optimization"]
        stage = zero["stage"]
        away = [zero.get(f"offload_{what}", {}).get("device", "none") != "none" for what in ("optimizer", "param")]
        buffers = 2 if stage in (1, 2) and zero.get("overlap_comm") else 1
        return cls(
            stage,
            trained and away[0],
            stage == 3 and away[1],
            DTYPES[settings.get("data_types", {}).get("grad_accum_dtype") or "fp32"].itemsize,
            buffers * int(zero.get("reduce_bucket_size", cls.bucket)),
            int(zero.get("stage3_max_live_parameters", cls.live)),
            int(zero.get("sub_group_size", cls.group)),
        )


@dataclass(frozen=True)
class Weights:
    """What decides the states of one model."""

    parameters: int  # elements in all
    trained: int  # elements with gradients; 0 of a frozen model
    largest: int  # elements of the largest tensor
    width: int  # bytes of an element: 4, 2 in bf16 and fp16
    zero: Zero = Zero()
    shared: int = 0  # elements among all that another model of the run holds (--share_base)

    @property
    def whole(self) -> int:
        """Bytes of all."""
        return self.width * self.parameters


@dataclass(frozen=True)
class States:
    """Bytes of one model on one process."""

    parameters: int  # weights
    gradients: int  # their sum over micro-batches
    optimizer: int  # the float32 copy, where there is one, and Adam's moments
    buffers: int = 0  # of DeepSpeed, all the time
    host: int = 0  # all of it that lies in main memory

    @property
    def total(self) -> int:
        """In the memory of the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def states(weights: Weights, processes: int) -> States:
    """What one process keeps of a model."""
    stage, zero = weights.zero.stage, weights.zero
    share = _share(weights.trained, processes)
    own = weights.parameters - weights.shared
    parameters = weights.width * (_share(own, processes) if stage == 3 else own)
    gradients = (FLOAT32 if weights.width == FLOAT32 else zero.gradient) * (share if stage >= 2 else weights.trained)
    optimizer = _optimizer_bytes(weights.width) * (share if stage >= 1 else weights.trained)
    buffers = _bucket(weights) if stage == 3 else 0
    host = parameters if zero.offload_weights else 0
    if zero.offload and stage == 3:  # one more float32 gradient is kept for the optimiser
        host += gradients + optimizer + FLOAT32 * share
    elif zero.offload:  # float32 gradients are kept for the processor's optimiser, and a copy of its weights
        host += optimizer + (2 * FLOAT32 + weights.width) * share
    if zero.offload:
        gradients = optimizer = 0
    return States(0 if zero.offload_weights else parameters, gradients, optimizer, buffers, host)


def averaging(weights: Weights, processes: int) -> tuple[int, int]:
    """A process's part of the float32 moving average: on its device, in main memory."""
    part = FLOAT32 * _share(weights.trained, processes)
    return (0, part) if weights.zero.offload_weights else (part, 0)


def passing(weights: Weights, processes: int) -> int:
    """Weights that are on the device during a forward or backward pass alone.

    At ZeRO 3 they are those that are whole at the time, of a model without DeepSpeed all that lie in main memory.
    """
    if weights.zero.offload_weights and weights.zero.stage < 3:
        return weights.whole
    if not _gathers(weights, processes):
        return 0
    return weights.width * min(weights.parameters, weights.zero.live + weights.largest)


def reducing(weights: Weights, processes: int) -> int:
    """DeepSpeed's own during a backward pass: gradients on their way to their sum and to other processes.

    The bucket of stages 2 and 3 is made as large as it may get, whatever the model's size.
    """
    stage = weights.zero.stage
    if stage == 3:
        return 0  # counted in `states`
    if stage == 2 or (stage == 1 and (weights.zero.offload or weights.width == FLOAT32)):
        return _bucket(weights)
    bucket = FLOAT32 * min(weights.trained, REDUCE_BUCKET) if processes > 1 else 0
    fresh = weights.width * weights.trained if stage == 1 else 0  # those of a micro-batch, until they are added up
    return bucket + fresh


def stepping(weights: Weights, processes: int, fused: bool) -> int:
    """The optimiser's own while it updates the weights.

    Where no kernel updates a tensor at once (`fused`), intermediate results are as large as the largest tensor.
    """
    stage = weights.zero.stage
    share = _share(weights.trained, processes)
    piece = min(weights.largest, weights.trained) if stage == 0 else min(share, weights.zero.group)
    flat = piece if stage == 3 else 0  # gradients put together
    return 0 if weights.zero.offload else FLOAT32 * (flat + (0 if fused else 2 * piece))


def gathering(weights: Weights, processes: int) -> int:
    """The whole weights beside a process's share of them, at ZeRO 3 while responses are sampled."""
    return weights.whole if _gathers(weights, processes) else 0


def _gathers(weights: Weights, processes: int) -> bool:
    """Whether DeepSpeed has to fetch weights: from other processes or from main memory."""
    return weights.zero.stage == 3 and (processes > 1 or weights.zero.offload_weights)


def _optimizer_bytes(width: int) -> int:
    return MOMENTS if width == FLOAT32 else MOMENTS + FLOAT32


def keeps_gradients(weights: Weights) -> bool:
    """Whether the sum of gradients stays in memory between updates: at ZeRO 3, and at 1 in half precision."""
    return weights.zero.stage == 3 or (weights.zero.stage == 1 and weights.width < FLOAT32)


def _bucket(weights: Weights) -> int:
    return weights.width * weights.zero.bucket if weights.trained else 0


def _share(elements: int, processes: int) -> int:
    return -(-elements // processes)
