# SPDX-License-Identifier: Apache-2.0
"""The memory that a run needs in any case, whatever its batches are; every run compares it with its machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dschat.base.errors import UserError
from dschat.models.limits import open_decoder_config
from dschat.plan.disk import disk_of
from dschat.plan.models import ConfigLoader, Role, roles_of
from dschat.plan.states import keeps_gradients, model_states, sampling_weight_bytes
from dschat.settings.common import CommonConfig


@dataclass(frozen=True)
class MinimumMemory:
    """Bytes that a process holds from the first update on, whatever the batches are, and that the run writes."""

    main: int  # main memory: without a GPU all models and optimizer states, otherwise what is offloaded
    gpu: int  # GPU memory; 0 without a GPU
    drawing: int = 0  # additional GPU memory during sampling: the actor's weights, which ZeRO 3 gathers
    disk: int = 0  # on the disk of --output_dir, at a time


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
