# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3: weights loaded in parts, whole weights for a while or one after another, and a process's own parts.

Also those of checkpoints that another number of processes wrote.

Gathering alone is not enough for generation: DeepSpeed's forward hooks release each module's weights right after its
first use. So the hooks are taken off, the weights gathered once, and afterwards everything is put back.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dschat.engine.deepspeed_config import EngineSettings, deepspeed_config
from dschat.models.opening import Placement, Whole
from dschat.run.distributed import device, largest_over_ranks, own_part, put_together, rank

# transformers reads several weights ahead unless this is set.
IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


def parameter_offload(engine: Any) -> Any | None:
    """The object of DeepSpeed that holds the stage-3 hooks; None below stage 3."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "parameter_offload"):
        return optimizer.parameter_offload
    return optimizer if hasattr(optimizer, "forward_hooks") else None


def hold_head(engine: Any) -> None:
    """Makes a policy's output head whole for all of a forward or backward pass; nothing to do below stage 3.

    Log-probs go through the head chunk by chunk, and the number of chunks depends on a rank's own response lengths.
    With DeepSpeed's hooks on the head, ranks would gather its weight unequally often, which hangs or crashes them.
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
    """Engines over the same frozen weights wait for each other's fetches; to be called before DeepSpeed has the model.

    Otherwise one engine finds a weight neither there nor cut into parts while the other fetches it ahead of its use.
    """
    parameters: list[Any] = list(model.parameters())
    known = (p.fetches for p in parameters if hasattr(p, "fetches"))
    model.ds_inflight_param_registry = fetches = next(known, InflightParamRegistry())
    for parameter in parameters:
        parameter.fetches = fetches


def at_rest(engine: Any) -> Any | None:
    """Waits for weights that are fetched ahead of their use, which a pass leaves and which can neither be gathered nor
    cut, and cuts all into parts. Every rank must call it. Returns what `parameter_offload` does.
    """
    offload = parameter_offload(engine)
    if offload is not None:
        offload.partition_all_parameters()
    return offload


@contextmanager
def gathered(engine: Any) -> Iterator[None]:
    """Whole weights, no hooks: forward passes of the engine's module inside need no other rank.

    Nothing inside may train or change the weights. Afterwards the module is as before, whatever happens inside.
    """
    offload = at_rest(engine)
    if offload is None:
        yield
        return
    _remove_hooks(offload)
    try:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=None):
            yield
    finally:
        offload._register_deepspeed_module(offload.module)
        hold_head(engine)


def parts(engine: Any) -> dict[str, Tensor]:
    """By name, this rank's part of every parameter that trains, flat and without padding."""
    at_rest(engine)
    return {name: _part(p) for name, p in engine.module.named_parameters() if p.requires_grad}


def _part(parameter: Any) -> Tensor:
    if not hasattr(parameter, "ds_id"):
        return own_part(parameter.detach().flatten())
    size = parameter.ds_tensor.numel()  # with padding
    return parameter.ds_tensor.detach()[: max(0, parameter.ds_numel - rank() * size)]


def whole_weights(engine: Any, instead: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and whole tensor of every parameter, gathered one at a time, then of every saved buffer. A tensor is valid
    until the next is asked for. Every rank must call it.

    `instead`: parts of values to be put together in the place of the parameters of these names.
    """
    at_rest(engine)
    for name, parameter in engine.module.named_parameters():
        if name in instead:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            yield name, put_together(instead[name].to(parameter.dtype), shape.numel()).view(shape)
            continue
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            yield name, parameter.detach()
    persistent = engine.module.state_dict().keys()
    yield from ((name, buffer) for name, buffer in engine.module.named_buffers() if name in persistent)


class SavedParts:
    """What ranks saved at ZeRO 3: parts of the trained parameters and of their Adam moments, by name.

    A rank's file holds flat tensors, one per sub-group of parameters: its parts in order, each padded to the same
    length on all ranks. The files are mapped into memory, so that only what is asked for is read.
    """

    def __init__(self, folder: Path) -> None:
        self.common = _mapped(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt")  # but the optimiser
        ranks = range(self.common["dp_world_size"])
        files = [_mapped(folder, f"*zero_pp_rank_{number}_mp_rank_00_optim_states.pt") for number in ranks]
        self.optimizers: list[dict[str, Any]] = [file["optimizer_state_dict"] for file in files]
        self._places: dict[str, tuple[int, int, int]] = {}  # by name: sub-group, where a part begins, elements in all
        for group, shapes in enumerate(self.common["param_shapes"]):
            begin = 0
            for name, shape in shapes.items():
                self._places[name] = group, begin, shape.numel()
                begin += -(-shape.numel() // len(ranks))

    def fill(self, part: Tensor, name: str, moment: str | None) -> None:
        """Writes this rank's new part of a parameter, or of its `moment`, into `part`, which may end in padding."""
        group, start, total = self._places[name]
        size = -(-total // len(self.optimizers))  # of a part that was saved
        begin = rank() * part.numel()
        for number, saved in enumerate(self.optimizers):
            first, last = max(begin, number * size), min(begin + part.numel(), (number + 1) * size, total)
            if first < last:
                states, shift = saved["optimizer_state_dict"]["state"], start - number * size
                flat = states[group][moment] if moment else saved["fp32_flat_groups"][group]
                part[first - begin : last - begin] = flat[first + shift : last + shift]


def _mapped(folder: Path, pattern: str) -> Any:
    (file,) = folder.glob(pattern)
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)


@torch.no_grad()
def load_resized(engine: Any, folder: Path) -> None:
    """Restores what another number of ranks saved: weights, optimiser, schedule, loss scale. Every rank must call it.

    DeepSpeed 0.19.8 converts such checkpoints, too, but then gives all parameter groups the first one's weight decay,
    and all sub-groups one step counter, which each of them advances. The engine is DeepSpeed's, not loaded yet.
    """
    saved, optimizer = SavedParts(folder), engine.optimizer
    optimizer.checkpoint_event_prologue()
    engine.load_module_state_dict(saved.common, strict=False)  # buffers; of parameters, it holds nothing
    live, before = optimizer.state_dict(), saved.optimizers[0]
    adam = before["optimizer_state_dict"]["state"].get(0, {})  # it has no state before its first update
    states: dict[int, dict[str, Any]] = {}
    for group, weights in enumerate(live["fp32_flat_groups"]):  # the engine's own: they are written in place
        moments = {key: torch.zeros_like(weights) for key in adam if key != "step"}
        end = 0
        for parameter in optimizer.fp16_groups[group]:
            begin, end = end, end + parameter.ds_tensor.numel()
            for key, flat in (None, weights), *moments.items():
                saved.fill(flat[begin:end], engine.param_names[parameter], key)
        if adam:
            states[group] = {"step": copy.deepcopy(adam["step"])} | moments
    pairs = zip(*(x["optimizer_state_dict"]["param_groups"] for x in (before, live)), strict=True)
    groups = [old | {"params": own["params"]} for old, own in pairs]
    live["optimizer_state_dict"] = {"state": states, "param_groups": groups}
    own_states = ("fp32_flat_groups", "optimizer_state_dict")
    optimizer.load_state_dict({rank(): before | {name: live[name] for name in own_states}})
    optimizer.checkpoint_event_epilogue()
    engine.lr_scheduler.load_state_dict(saved.common["lr_scheduler"])
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, saved.common[name])


def _remove_hooks(offload: Any) -> None:
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []


def placement_of(settings: EngineSettings) -> Placement:
    """Where an engine with these settings wants the weights of its model."""
    return Sharded(settings) if settings.zero_stage == 3 else Whole(device())


class Sharded:
    """A part of every weight on every process.

    transformers makes a model without memory and gives it one weight after another from its files, which are mapped
    into memory. Each is cut where a module is given it; what is not kept is not even read, unless it is converted.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Takes the engine's settings: they decide the data type, and whether parts lie in CPU memory."""
        self._dtype = settings.dtype
        self._zero = deepspeed.zero.Init(config_dict_or_path=deepspeed_config(settings, 0.0))

    @contextmanager
    def load_sharded(self) -> Iterator[dict[str, Any]]:
        before = os.environ.get(IN_TURN)
        os.environ[IN_TURN] = "1"
        hook = register_module_parameter_registration_hook(self._cut_on_arrival)
        try:
            yield {}
        finally:
            hook.remove()
            os.environ.pop(IN_TURN)
            if before is not None:
                os.environ[IN_TURN] = before

    @contextmanager
    def whole(self, model: nn.Module, *modules: nn.Module) -> Iterator[None]:
        """Puts ordinary weights in the place of the modules' parts, and cuts what is there at the end."""
        ordinary = {p: _gathered(p) for module in modules for p in module.parameters() if hasattr(p, "ds_id")}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in ordinary:  # also where several modules share it
                    setattr(module, name, ordinary[parameter])
        yield
        self.finalise(model)

    def finalise(self, model: nn.Module) -> None:
        """Cuts what is whole, as the main process has it."""
        left = [p for p in model.parameters() if not hasattr(p, "ds_id")]
        for parameter in left:
            parameter.data = parameter.data.to(self._dtype)
        self._zero._convert_to_zero_parameters(left)

    def _cut_on_arrival(self, module: nn.Module, name: str, given: Any) -> Any:
        if given is None:
            return None
        if hasattr(given, "ds_id"):
            return self._tied(module._parameters.get(name), given)
        if getattr(given, "_is_hf_initialized", False) and not given.is_meta:  # it comes from a file
            given.data = given.data.to(self._dtype)
            self._zero._convert_to_deepspeed_param(given)
            given.partition()
            given.data = given.data.to(device())  # holds nothing, but says where the weight is gathered
        return given

    def _tied(self, held: Any, given: Any) -> Any:
        """The weight to share, or the module's own, where both were in the files and differ.

        transformers compares whole weights before it ties them; here every process compares its parts.
        """
        if held is None or held is given or not hasattr(held, "ds_id"):
            return given
        differ = largest_over_ranks(int(not torch.equal(held.ds_tensor, given.ds_tensor)))
        return held if differ else given


def _gathered(parameter: nn.Parameter) -> nn.Parameter:
    with deepspeed.zero.GatheredParameters([parameter]):
        return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
