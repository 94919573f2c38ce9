# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 3 from the first weight on: what a process reads of a model is its own part, weight by weight."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dschat.engine.deepspeed_config import EngineSettings, deepspeed_config
from dschat.models.placement import Placement, Whole
from dschat.run.distributed import device, largest_over_ranks

# transformers reads several weights ahead unless this is set.
IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


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
    def arriving(self) -> Iterator[dict[str, Any]]:
        """Cuts each weight that a module is given."""
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
        self.settle(model)

    def settle(self, model: nn.Module) -> None:
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
