# SPDX-License-Identifier: Apache-2.0
"""The reference of a LoRA run."""

from typing import Any

import torch
from torch import Tensor

from dschat.engine.engine import Engine
from dschat.models.lora import adapters_off
from dschat.models.policy import PolicyModel


class AdaptersOff:
    """The actor's engine with its adapters off, without a second copy of the weights."""

    def __init__(self, actor: Engine[PolicyModel]) -> None:
        self._actor = actor

    @property
    def module(self) -> PolicyModel:
        return self._actor.module

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), adapters_off(self._actor.module):
            return self._actor(*args, **kwargs)
