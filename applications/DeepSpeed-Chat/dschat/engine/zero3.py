# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3: gathering weights, and this process's parts; sharded_loading.py opens a model in parts.

Gathering alone is not enough for generation: DeepSpeed's forward hooks release each module's weights after every use.
So `gathered` removes the hooks, gathers the weights once, and restores both afterwards.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from torch import Tensor

from dschat.models.parameters import whole_numel, whole_shape
from dschat.run.distributed import own_part, put_together, rank


def parameter_offload(engine: Any) -> Any | None:
    """DeepSpeed's object with the stage-3 hooks; None below stage 3."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "parameter_offload"):
        return optimizer.parameter_offload
    return optimizer if hasattr(optimizer, "forward_hooks") else None


def hold_head(engine: Any) -> None:
    """Keeps a policy's output head gathered during whole forward and backward passes; does nothing below stage 3.

    Log-probs are computed chunk by chunk, and the number of chunks depends on a rank's response lengths. With
    DeepSpeed's hooks on the head, ranks would gather its weight unequally often, which hangs or crashes them.
    """
    head = engine.module.output_head
    if parameter_offload(engine) is None or head is None:
        return
    for parameter in head.parameters():
        for user in (engine.module, engine.module.inner):
            deepspeed.zero.register_external_parameter(user, parameter)
    head._forward_hooks.clear()
    head._forward_pre_hooks.clear()


def share_fetches(model: Any) -> None:
    """Makes engines over the same frozen weights wait for each other's fetches; call it before DeepSpeed's initialize.

    Otherwise, while one engine prefetches a weight, another would find it neither available nor partitioned.
    """
    parameters: list[Any] = list(model.parameters())
    registries = [parameter.fetches for parameter in parameters if hasattr(parameter, "fetches")]
    fetches = registries[0] if registries else InflightParamRegistry()
    model.ds_inflight_param_registry = fetches
    for parameter in parameters:
        parameter.fetches = fetches


def wait_for_prefetch(engine: Any) -> None:
    """Waits for weights that a pass has prefetched, and partitions all weights again. Every rank must call it.

    A weight that is being prefetched can neither be gathered nor partitioned.
    """
    offload = parameter_offload(engine)
    if offload is not None:
        offload.partition_all_parameters()


@contextmanager
def gathered(engine: Any) -> Iterator[None]:
    """Inside, weights are whole and hooks removed, so that forward passes of the engine's module need no other rank.

    Nothing inside may train or change the weights. Afterwards the module is as before, even after an exception.
    """
    offload = parameter_offload(engine)
    if offload is None:
        yield
        return
    wait_for_prefetch(engine)
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []
    try:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=None):
            yield
    finally:
        offload._register_deepspeed_module(offload.module)
        hold_head(engine)


def parts(engine: Any) -> dict[str, Tensor]:
    """This rank's part of every trained parameter by name, flat and without padding."""
    wait_for_prefetch(engine)
    trained = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
    return {name: _local_part(parameter) for name, parameter in trained.items()}


def _local_part(parameter: Any) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return own_part(parameter.detach().flatten())
    padded_size = parameter.ds_tensor.numel()
    return parameter.ds_tensor.detach()[: max(0, parameter.ds_numel - rank() * padded_size)]


def whole_weights(engine: Any, instead: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields name and whole tensor of every parameter, gathered one at a time, then of every saved buffer.

    A tensor is valid until the next one. Every rank must call it.

    Args:
        engine: DeepSpeed's engine.
        instead: this rank's parts of other values, which replace the parameters of these names.
    """
    wait_for_prefetch(engine)
    for name, parameter in engine.module.named_parameters():
        if name in instead:
            local_part = instead[name].to(parameter.dtype)
            yield name, put_together(local_part, whole_numel(parameter)).view(whole_shape(parameter))
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            yield name, parameter.detach()
    saved_names = engine.module.state_dict().keys()
    for name, buffer in engine.module.named_buffers():
        if name in saved_names:
            yield name, buffer
