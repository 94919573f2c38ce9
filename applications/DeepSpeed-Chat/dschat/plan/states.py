# SPDX-License-Identifier: Apache-2.0
"""Memory that a model holds between passes on each of N processes: parameters, gradients, optimizer states (bytes).

In bf16 and fp16 the optimizer works on a float32 copy of the weights, and Adam holds two float32 moments. Gradients
are added up in float32 in bf16, and in fp16 in fp16. ZeRO 1 shards the optimizer states over the processes, 2 also
the gradients, 3 also the weights. DeepSpeed's stage 0 is used in float32 only: in half precision, stage 1 replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dschat.models.opening import DTYPES

FLOAT32 = 4  # bytes
MOMENTS = 2 * FLOAT32  # Adam's two moments of one weight
# DeepSpeed's defaults, in elements: gradients that are reduced at a time, weights that ZeRO 3 fetches ahead, and
# weights that ZeRO 3 updates at a time.
REDUCE_BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 1_000_000_000


@dataclass(frozen=True)
class Zero:
    """The settings of DeepSpeed that decide memory."""

    stage: int = 0  # the stage in effect
    offload: bool = False  # optimizer states are in main memory
    offload_weights: bool = False  # weights are in main memory (stage 3)
    gradient: int = FLOAT32  # bytes per element of the summed gradients in half precision
    sums_at_once: bool = False  # bf16: each gradient is added to its sum, and freed, during the backward pass
    bucket: int = REDUCE_BUCKET
    live: int = LIVE_PARAMETERS
    group: int = SUB_GROUP

    @classmethod
    def of(cls, settings: Mapping[str, Any], trained: bool = True) -> Zero:
        """Reads the dictionary that `dschat.settings.deepspeed.deepspeed_settings` returns.

        A model that is not `trained` has no optimizer states, so none are offloaded.
        """
        zero = settings["zero_optimization"]
        stage = zero["stage"]
        accumulation = _gradient_dtype(settings)
        # DeepSpeed's bf16 optimiser, which alone adds gradients up at once, has sums in float32.
        bf16 = settings["bf16"]
        has_bf16_optimizer = bf16.get("enabled") and accumulation == torch.float32
        buffers = 2 if stage in (1, 2) and zero.get("overlap_comm") else 1
        return cls(
            stage=stage,
            offload=trained and _is_offloaded(zero, "offload_optimizer"),
            offload_weights=stage == 3 and _is_offloaded(zero, "offload_param"),
            gradient=accumulation.itemsize,
            sums_at_once=bool(has_bf16_optimizer and bf16.get("immediate_grad_update")),
            bucket=buffers * int(zero.get("reduce_bucket_size", cls.bucket)),
            live=int(zero.get("stage3_max_live_parameters", cls.live)),
            group=int(zero.get("sub_group_size", cls.group)),
        )


def _gradient_dtype(settings: Mapping[str, Any]) -> torch.dtype:
    """The type in which DeepSpeed adds gradients up: the one that its file names, or the weights' own."""
    name = settings.get("data_types", {}).get("grad_accum_dtype")
    if name is not None:
        return DTYPES[name]
    for half in ("bf16", "fp16"):
        if settings.get(half, {}).get("enabled"):
            return DTYPES[half]
    return torch.float32


def _is_offloaded(zero: Mapping[str, Any], section: str) -> bool:
    device = zero.get(section, {}).get("device", "none")
    return bool(device != "none")


@dataclass(frozen=True)
class Weights:
    """The sizes of one model that decide its states."""

    parameters: int  # number of elements
    trained: int  # elements with gradients; 0 for a frozen model
    largest: int  # elements of the largest tensor
    width: int  # bytes per element: 4, or 2 in bf16 and fp16
    zero: Zero = Zero()
    shared: int = 0  # elements that belong to another model of the run (--share_base)

    @property
    def whole(self) -> int:
        """Bytes of all weights."""
        return self.width * self.parameters


@dataclass(frozen=True)
class States:
    """Bytes that one process holds for a model."""

    parameters: int  # weights
    gradients: int  # their sum over micro-batches
    optimizer: int  # Adam's moments and, in half precision, the float32 copy of the weights
    buffers: int = 0  # DeepSpeed's permanent buffers
    host: int = 0  # what is in main memory instead

    @property
    def total(self) -> int:
        """Bytes in the memory of the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def model_states(weights: Weights, processes: int) -> States:
    """What one process holds for a model between passes."""
    stage = weights.zero.stage
    shard = _share(weights.trained, processes)
    unshared = weights.parameters - weights.shared

    # Device memory, as if nothing were offloaded.
    parameters = weights.width * (_share(unshared, processes) if stage == 3 else unshared)
    gradient_width = FLOAT32 if weights.width == FLOAT32 else weights.zero.gradient
    gradients = gradient_width * (shard if stage >= 2 else weights.trained)
    optimizer = _optimizer_bytes(weights.width) * (shard if stage >= 1 else weights.trained)
    buffers = _bucket_bytes(weights) if stage == 3 else 0

    # Main memory.
    host = parameters if weights.zero.offload_weights else 0
    if weights.zero.offload and stage == 3:
        # The optimizer keeps one more float32 gradient.
        host += gradients + optimizer + FLOAT32 * shard
    elif weights.zero.offload:
        # The CPU optimizer keeps float32 gradients and a copy of its weights.
        host += optimizer + (2 * FLOAT32 + weights.width) * shard

    if weights.zero.offload:
        gradients = 0
        optimizer = 0
    if weights.zero.offload_weights:
        parameters = 0
    return States(parameters, gradients, optimizer, buffers, host)


def ema_bytes(weights: Weights, processes: int) -> tuple[int, int]:
    """One process's shard of the float32 moving average: bytes on its device, bytes in main memory."""
    shard = FLOAT32 * _share(weights.trained, processes)
    if weights.zero.offload_weights:
        return 0, shard
    return shard, 0


def pass_weight_bytes(weights: Weights, processes: int) -> int:
    """Weights that are on the device only during a forward or backward pass.

    At ZeRO 3 these are the weights that are gathered at a time; for an offloaded model without DeepSpeed, all of them.
    """
    if weights.zero.offload_weights and weights.zero.stage < 3:
        return weights.whole
    if not _gathers(weights, processes):
        return 0
    return weights.width * min(weights.parameters, weights.zero.live + weights.largest)


def reduction_bytes(weights: Weights, processes: int) -> int:
    """DeepSpeed's buffers in a backward pass, which hold gradients until they are summed and sent.

    The bucket of stages 2 and 3 is allocated at its full size, whatever the size of the model.
    """
    stage = weights.zero.stage
    if stage == 3:
        return 0  # `model_states` counts it
    if stage == 2 or (stage == 1 and (weights.zero.offload or weights.width == FLOAT32)):
        return _bucket_bytes(weights)
    bucket = FLOAT32 * min(weights.trained, REDUCE_BUCKET) if processes > 1 else 0
    keeps_gradients = stage == 1 and not weights.zero.sums_at_once  # those of the micro-batch, beside their sum
    micro_batch = weights.width * weights.trained if keeps_gradients else 0
    return bucket + micro_batch


def step_bytes(weights: Weights, processes: int, fused: bool) -> int:
    """Temporary memory of the optimizer's step.

    Unless one kernel updates a whole tensor (`fused`), temporaries are as large as the largest tensor.
    """
    if weights.zero.offload:
        return 0
    stage = weights.zero.stage
    if stage == 0:
        piece = min(weights.largest, weights.trained)
    else:
        piece = min(_share(weights.trained, processes), weights.zero.group)
    flat_gradients = piece if stage == 3 else 0
    temporaries = 0 if fused else 2 * piece
    return FLOAT32 * (flat_gradients + temporaries)


def sampling_weight_bytes(weights: Weights, processes: int) -> int:
    """Weights that ZeRO 3 gathers for sampling, in addition to a process's shard."""
    return weights.whole if _gathers(weights, processes) else 0


def keeps_gradients(weights: Weights) -> bool:
    """Whether summed gradients stay in memory between updates: at ZeRO 3, and at ZeRO 1 in half precision."""
    return weights.zero.stage == 3 or (weights.zero.stage == 1 and weights.width < FLOAT32)


def _gathers(weights: Weights, processes: int) -> bool:
    """Whether DeepSpeed fetches weights from other processes or from main memory."""
    return weights.zero.stage == 3 and (processes > 1 or weights.zero.offload_weights)


def _optimizer_bytes(width: int) -> int:
    """Optimizer states per weight."""
    return MOMENTS if width == FLOAT32 else MOMENTS + FLOAT32


def _bucket_bytes(weights: Weights) -> int:
    return weights.width * weights.zero.bucket if weights.trained else 0


def _share(elements: int, processes: int) -> int:
    return -(-elements // processes)
