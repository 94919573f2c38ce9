# SPDX-License-Identifier: Apache-2.0
"""The reference of a LoRA run."""

import torch
from torch import Tensor

from dschat.engine.engine import Engine
from dschat.models.lora import adapters_off
from dschat.models.policy import PolicyModel


class AdaptersOff:
    """The actor's engine with its adapters off: no second copy of the weights."""

    def __init__(self, actor: Engine[PolicyModel]) -> None:
        self._actor = actor

    @property
    def module(self) -> PolicyModel:
        """The shared module."""
        return self._actor.module

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        targets: Tensor | int,
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies under the base model; see `PolicyModel.forward`."""
        with torch.no_grad(), adapters_off(self._actor.module):
            return self._actor(input_ids, attention_mask, targets, temperature, with_entropy)
