# SPDX-License-Identifier: Apache-2.0
"""The memory that a run needs in any case, whatever its batches are; every run compares it with its machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dschat.base.errors import UserError
from dschat.models.limits import open_decoder_config
from dschat.plan.disk import disk_of
from dschat.plan.models import ConfigLoader, Role, roles_of
from dschat.plan.states import keeps_gradients, model_states, sampling_weight_bytes
from dschat.run.preflight import MinimumMemory
from dschat.settings.common import CommonConfig


def minimum_memory(
    config: CommonConfig, processes: int, device: torch.device, load_config: ConfigLoader = open_decoder_config
) -> MinimumMemory | None:
    """Memory that a run needs in any case; None if a model cannot be opened, which the run itself reports better.

    Only the type of `device` matters.
    """
    try:
        roles = roles_of(config, config.plan_batches(processes), load_config, device)
    except UserError:
        return None
    held = kept_bytes(roles, processes)
    offloaded = sum(model_states(role.weights, processes).host for role in roles)
    disk = disk_of(config, roles, processes).total
    if device.type == "cpu":
        return MinimumMemory(held + offloaded, 0, disk=disk)
    gathered = 0
    if config.samples_here:
        gathered = sampling_weight_bytes(roles[0].weights, processes)
    return MinimumMemory(offloaded, held, gathered, disk)


def kept_bytes(roles: Sequence[Role], processes: int) -> int:
    """Bytes that models hold between phases; gradients count only with `keeps_gradients`."""
    total = 0
    for role in roles:
        states = model_states(role.weights, processes)
        total += states.total
        if not keeps_gradients(role.weights):
            total -= states.gradients
    return total
