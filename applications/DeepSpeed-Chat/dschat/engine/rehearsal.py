# SPDX-License-Identifier: Apache-2.0
"""A forward and backward pass under DeepSpeed that takes the memory of training and leaves nothing behind.

The pass goes through the module itself, not through DeepSpeed's engine: hooks that fetch the weights of ZeRO 3 are the
module's and act, while loss scaling, accumulation counters and the reduction over processes are the engine's and do
not. The hooks that hand a parameter's gradient to the ZeRO optimiser call one of its methods, which is replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from dschat.engine import zero3
from dschat.run.distributed import world_size

FLOAT32 = torch.float32.itemsize
ADAM_BYTES = 2 * FLOAT32  # of Adam, per weight
# Methods that gradients arrive at: of ZeRO 1 and 2, of ZeRO 1 in bf16, and of ZeRO 3. At stage 0 nothing takes them.
RECEIVERS = ("process_gradients", "accumulate_hp_grads_and_remove_lp", "reduce_ready_partitions_and_remove_grads")


@contextmanager
def gradients_dropped(engine: Any) -> Iterator[None]:
    """Inside, a backward pass of the module of DeepSpeed's engine hands no gradient to the optimiser.

    From ZeRO 1 on, a gradient is dropped where it arrives; without ZeRO gradients are kept until the end, as in
    training. Every rank must enter and leave it.
    """
    optimizer = engine.optimizer
    replaced = [name for name in RECEIVERS if hasattr(optimizer, name)]
    for name in replaced:
        setattr(optimizer, name, _drop)
    try:
        yield
    finally:
        for name in replaced:
            delattr(optimizer, name)  # the class's own method shows again
        for parameter in engine.module.parameters():
            parameter.grad = None
    offload = zero3.parameter_offload(engine)
    if offload is not None:
        offload.release_backward_leftovers()
        zero3.at_rest(engine)


def _drop(parameter: nn.Parameter, *_: int) -> None:
    """Takes the place of a receiver, which may also be told the parameter's place in its groups."""
    parameter.grad = None


def bytes_to_come(engine: Any, adam: torch.optim.Optimizer | None) -> int:
    """Memory of this process's device that the first update takes and that later micro-batches find taken.

    It is that of Adam's moments, unless a checkpoint has brought them; and, where an update has several micro-batches,
    that of the sum of their gradients. What is offloaded takes none.

    Args:
        engine: DeepSpeed's.
        adam: the optimiser that it was given; None of a frozen model.

    Returns:
        Bytes.
    """
    if engine.zero_use_cpu_optimizer():
        return 0
    stage = engine.zero_optimization_stage()
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    share = -(-elements // world_size())
    room = 0
    if adam is not None and not adam.state:
        room += ADAM_BYTES * (share if stage >= 1 else elements)
    allocates_sums = stage < 3 and not isinstance(engine.optimizer, BF16_Optimizer)  # the others have done so
    if allocates_sums and engine.gradient_accumulation_steps() > 1:
        room += FLOAT32 * (share if stage >= 2 else elements)
    return room
