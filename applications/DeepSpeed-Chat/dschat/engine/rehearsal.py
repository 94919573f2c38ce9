# SPDX-License-Identifier: Apache-2.0
"""A forward and backward pass under DeepSpeed that uses the memory of training but changes nothing.

The pass calls the module, not DeepSpeed's engine. The module's hooks, which fetch the weights of ZeRO 3, act; the
engine's loss scaling, accumulation counters and reduction over processes do not. The hooks that pass a parameter's
gradient to the ZeRO optimiser call one of its methods, which is replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from dschat.engine import zero3
from dschat.models.parameters import whole_numel
from dschat.run.distributed import world_size

FLOAT32 = torch.float32.itemsize
ADAM_BYTES = 2 * FLOAT32  # Adam's moments, per weight
# Methods that receive gradients: of ZeRO 1 and 2, of ZeRO 1 in bf16, and of ZeRO 3. At stage 0 there is none.
RECEIVERS = ("process_gradients", "accumulate_hp_grads_and_remove_lp", "reduce_ready_partitions_and_remove_grads")


@contextmanager
def gradients_dropped(engine: Any) -> Iterator[None]:
    """Inside, a backward pass of the module of DeepSpeed's engine passes no gradient to the optimiser.

    Gradients live as long as in training: until the end of the pass without ZeRO, and at ZeRO 1 if an update has one
    micro-batch and DeepSpeed's bf16 optimiser is not in use. Otherwise each is dropped when it arrives; the sum of
    several micro-batches counts in `first_update_bytes`. Every rank must enter and leave it.
    """
    optimizer = engine.optimizer
    keeps_gradients = (
        engine.zero_optimization_stage() == 1
        and engine.gradient_accumulation_steps() == 1
        and not isinstance(optimizer, BF16_Optimizer)
    )
    receive = _keep if keeps_gradients else _drop
    replaced = [name for name in RECEIVERS if hasattr(optimizer, name)]
    for name in replaced:
        setattr(optimizer, name, receive)
    try:
        yield
    finally:
        for name in replaced:
            delattr(optimizer, name)  # the class's method is visible again
        for parameter in engine.module.parameters():
            parameter.grad = None
    offload = zero3.parameter_offload(engine)
    if offload is not None:
        offload.release_backward_leftovers()
        zero3.wait_for_prefetch(engine)


def _drop(parameter: nn.Parameter, *_: int) -> None:
    """Replaces a receiver of gradients; some receivers also take the parameter's index in its group."""
    parameter.grad = None


def _keep(parameter: nn.Parameter, *_: int) -> None:
    """Replaces a receiver that leaves gradients where they are."""


def first_update_bytes(engine: Any, adam: torch.optim.Optimizer | None) -> int:
    """Bytes of device memory that the first update allocates and keeps.

    They hold Adam's moments, unless a checkpoint was loaded, and the sum of gradients if an update has several
    micro-batches. With offloading, none.

    Args:
        engine: DeepSpeed's engine.
        adam: the optimiser that it was given; None for a frozen model.
    """
    if engine.zero_use_cpu_optimizer():
        return 0
    stage = engine.zero_optimization_stage()
    trained = []
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            trained.append(parameter)
    elements = sum(whole_numel(parameter) for parameter in trained)
    local_elements = -(-elements // world_size())
    size = 0
    if adam is not None and not adam.state:
        size += ADAM_BYTES * (local_elements if stage >= 1 else elements)
    # ZeRO 3 and the bf16 optimiser have allocated gradient sums already.
    allocates_sums = stage < 3 and not isinstance(engine.optimizer, BF16_Optimizer)
    if allocates_sums and engine.gradient_accumulation_steps() > 1:
        size += FLOAT32 * (local_elements if stage >= 2 else elements)
    return size
