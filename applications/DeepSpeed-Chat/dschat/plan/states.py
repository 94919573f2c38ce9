# SPDX-License-Identifier: Apache-2.0
"""Bytes of what a model keeps between passes: parameters, gradients, optimiser states.

In bf16 and fp16 the optimiser works on a float32 copy of the weights, gradients are added up in float32, and Adam
holds two float32 moments. ZeRO 1 divides the optimiser's part among N processes, 2 the gradients, 3 the weights.
DeepSpeed's stage 0 is used in float32 only: in half precision 1 takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32 = 4  # bytes
MOMENTS = 2 * FLOAT32  # of Adam, per weight
# DeepSpeed's defaults, in elements: gradients that are reduced at a time, weights that ZeRO 3 fetches ahead.
REDUCE_BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Weights:
    """What decides the states of one model."""

    parameters: int  # elements in all
    trained: int  # elements with gradients; 0 of a frozen model
    largest: int  # elements of the largest tensor
    width: int  # bytes of an element: 4, 2 in bf16 and fp16
    stage: int  # of ZeRO
    offload: bool = False  # the optimiser's part in main memory, at stage 3 the weights, too
    shared: int = 0  # elements among all that another model of the run holds (--share_base)


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
        """Bytes in the memory of the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def effective_stage(stage: int, width: int, trained: bool = True) -> int:
    """The ZeRO stage that is used: in half precision at least 1."""
    return max(stage, 1) if trained and width < FLOAT32 else stage


def states(weights: Weights, processes: int) -> States:
    """What one process keeps of a model.

    Args:
        weights: of the model.
        processes: N.
    """
    stage = effective_stage(weights.stage, weights.width, weights.trained > 0)
    share = _share(weights.trained, processes)
    own = weights.parameters - weights.shared
    parameters = weights.width * (_share(own, processes) if stage == 3 else own)
    gradients = FLOAT32 * (share if stage >= 2 else weights.trained)
    optimizer = _optimizer_bytes(weights.width) * (share if stage >= 1 else weights.trained)
    buffers = _bucket(weights) if stage == 3 else 0
    if not weights.offload:
        return States(parameters, gradients, optimizer, buffers)
    if stage == 3:  # one more float32 gradient is kept for the optimiser
        return States(0, 0, 0, buffers, parameters + gradients + optimizer + FLOAT32 * share)
    # The processor's optimiser keeps float32 gradients, and a copy of its weights in the model's format.
    return States(parameters, 0, 0, 0, optimizer + (2 * FLOAT32 + weights.width) * share)


def averaging(weights: Weights, processes: int) -> tuple[int, int]:
    """Bytes of a process's part of the float32 moving average: on its device, in main memory.

    Args:
        weights: of the model.
        processes: N.
    """
    part = FLOAT32 * _share(weights.trained, processes)
    return (0, part) if weights.offload and weights.stage == 3 else (part, 0)


def passing(weights: Weights, processes: int) -> int:
    """Bytes of DeepSpeed's own during a forward or backward pass: at ZeRO 3 the weights that are whole at the time.

    Args:
        weights: of the model.
        processes: N.
    """
    if effective_stage(weights.stage, weights.width) < 3 or (processes == 1 and not weights.offload):
        return 0
    return weights.width * min(weights.parameters, LIVE_PARAMETERS + weights.largest)


def reducing(weights: Weights, processes: int) -> int:
    """Bytes of DeepSpeed's own during a backward pass: gradients on their way to their sum and to other processes.

    The bucket of stages 2 and 3 is made as large as it may get, whatever the model's size.

    Args:
        weights: of the model.
        processes: N.
    """
    stage = effective_stage(weights.stage, weights.width)
    if stage == 3:
        return 0  # counted in `states`
    if stage == 2 or (stage == 1 and (weights.offload or weights.width == FLOAT32)):
        return _bucket(weights)
    bucket = FLOAT32 * min(weights.trained, REDUCE_BUCKET) if processes > 1 else 0
    fresh = weights.width * weights.trained if stage == 1 else 0  # those of a micro-batch, until they are added up
    return bucket + fresh


def stepping(weights: Weights, processes: int, fused: bool) -> int:
    """Bytes of the optimiser's own while it updates the weights.

    Args:
        weights: of the model.
        processes: N.
        fused: one kernel updates a tensor; else intermediate results are as large as the largest tensor.
    """
    stage = effective_stage(weights.stage, weights.width)
    share = _share(weights.trained, processes)
    piece = min(weights.largest, weights.trained) if stage == 0 else min(share, LIVE_PARAMETERS)
    flat = piece if stage == 3 else 0  # gradients put together
    return 0 if weights.offload else FLOAT32 * (flat + (0 if fused else 2 * piece))


def gathering(weights: Weights, processes: int) -> int:
    """Bytes of the whole weights beside a process's share of them, at ZeRO 3 while responses are sampled."""
    if effective_stage(weights.stage, weights.width) < 3 or (processes == 1 and not weights.offload):
        return 0
    return weights.width * weights.parameters


def _optimizer_bytes(width: int) -> int:
    return MOMENTS if width == FLOAT32 else MOMENTS + FLOAT32


def keeps_gradients(weights: Weights) -> bool:
    """Whether the sum of gradients stays in memory between updates: at ZeRO 3, and at 1 in half precision."""
    stage = effective_stage(weights.stage, weights.width)
    return stage == 3 or (stage == 1 and weights.width < FLOAT32)


def _bucket(weights: Weights) -> int:
    return weights.width * REDUCE_BUCKET if weights.trained else 0


def _share(elements: int, processes: int) -> int:
    return -(-elements // processes)
