# SPDX-License-Identifier: Apache-2.0
"""Opening a model for ZeRO stage 3: every process keeps a part of each weight from the moment that it is read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dschat.engine.deepspeed_config import EngineSettings, deepspeed_config
from dschat.run.distributed import device, largest_over_ranks

# transformers loads several weights ahead unless this variable is set.
SEQUENTIAL_LOAD_VARIABLE = "HF_DEACTIVATE_ASYNC_LOAD"


class Sharded:
    """Places a part of every weight on every process.

    transformers creates a model without memory and sets one weight after another from memory-mapped files. Each weight
    is partitioned when it is registered in its module, so other ranks' parts are not read, unless it is converted.
    """

    def __init__(self, settings: EngineSettings) -> None:
        """Takes the engine's settings, which determine the dtype and whether parts are in CPU memory."""
        self._dtype = settings.dtype
        self._zero = deepspeed.zero.Init(config_dict_or_path=deepspeed_config(settings, 0.0))

    @contextmanager
    def while_loading(self) -> Iterator[dict[str, Any]]:
        previous = os.environ.get(SEQUENTIAL_LOAD_VARIABLE)
        os.environ[SEQUENTIAL_LOAD_VARIABLE] = "1"
        hook = register_module_parameter_registration_hook(self._partition_on_registration)
        try:
            yield {}
        finally:
            hook.remove()
            os.environ.pop(SEQUENTIAL_LOAD_VARIABLE)
            if previous is not None:
                os.environ[SEQUENTIAL_LOAD_VARIABLE] = previous

    @contextmanager
    def gathered(self, model: nn.Module, *modules: nn.Module) -> Iterator[None]:
        """Replaces the modules' partitioned weights by ordinary ones, and partitions them again at the end."""
        ordinary: dict[nn.Parameter, nn.Parameter] = {}
        for module in modules:
            for parameter in module.parameters():
                if hasattr(parameter, "ds_id"):
                    ordinary[parameter] = _gathered_copy(parameter)
        for module in model.modules():  # several modules may share a weight
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in ordinary:
                    setattr(module, name, ordinary[parameter])
        yield
        self.finalise(model)

    def finalise(self, model: nn.Module) -> None:
        """Partitions the weights that are still whole, with the main process's values."""
        unpartitioned = []
        for parameter in model.parameters():
            if not hasattr(parameter, "ds_id"):
                unpartitioned.append(parameter)
        for parameter in unpartitioned:
            parameter.data = parameter.data.to(self._dtype)
        self._zero._convert_to_zero_parameters(unpartitioned)

    def _partition_on_registration(self, module: nn.Module, name: str, weight: Any) -> Any:
        if weight is None:
            return None
        if hasattr(weight, "ds_id"):
            return self._tied(module._parameters.get(name), weight)
        is_from_file = getattr(weight, "_is_hf_initialized", False) and not weight.is_meta
        if is_from_file:
            weight.data = weight.data.to(self._dtype)
            self._zero._convert_to_deepspeed_param(weight)
            weight.partition()
            weight.data = weight.data.to(device())  # empty, but determines where the weight is gathered
        return weight

    def _tied(self, present: Any, shared: Any) -> Any:
        """The weight to share; or the module's present one, if both were in the files and differ.

        transformers compares whole weights before it ties them; here every process compares its parts.
        """
        if present is None or present is shared or not hasattr(present, "ds_id"):
            return shared
        differs_here = not torch.equal(present.ds_tensor, shared.ds_tensor)
        return present if largest_over_ranks(int(differs_here)) else shared


def _gathered_copy(parameter: nn.Parameter) -> nn.Parameter:
    with deepspeed.zero.GatheredParameters([parameter]):
        return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
