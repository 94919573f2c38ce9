# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: its models, phases, main memory and counts; and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.plan.host import Host, host_of
from dschat.plan.machine import CUDA_BYTES, Machine
from dschat.plan.models import Role, roles_of
from dschat.plan.phases import Phase, phases_of

Configs = Callable[[str, str], PreTrainedConfig]


@dataclass(frozen=True)
class Plan:
    """What a run takes.

    Attributes:
        config: its flags.
        machine: what it has.
        roles: its models.
        phases: in the order of an iteration.
        host: main memory of a node.
    """

    config: CommonConfig
    machine: Machine
    roles: tuple[Role, ...]
    phases: tuple[Phase, ...]
    host: Host

    @property
    def worst(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes of a process's device, what CUDA takes included."""
        return self.worst.total + (0 if self.machine.device_memory is None else CUDA_BYTES)

    @property
    def main_memory(self) -> int:
        """Bytes of main memory of a node; on a CPU the processes compute there."""
        on_cpu = self.machine.on_a_node * self.worst.total if self.machine.device_memory is None else 0
        return self.host.total + on_cpu

    @property
    def whole_actor(self) -> int:
        """Bytes of the actor's weights, which each GPU holds whole while it draws responses; 0 in other steps."""
        actor = self.roles[0].weights
        return actor.width * actor.parameters if isinstance(self.config, PPOConfig) else 0

    @property
    def fits_device(self) -> bool:
        """Whether a GPU holds it."""
        return self.machine.device_memory is None or self.peak <= self.machine.device_memory

    @property
    def fits_host(self) -> bool:
        """Whether main memory holds it, as far as that is known."""
        return self.machine.main_memory is None or self.main_memory <= self.machine.main_memory

    @property
    def fits(self) -> bool:
        """Whether the run can be made."""
        return self.fits_device and self.fits_host

    @property
    def excess(self) -> int:
        """Bytes too many, of a GPU and of main memory; below 0 where there is room."""
        device, main = self.machine.device_memory, self.machine.main_memory
        too_many = [self.peak - device] if device is not None else []
        too_many += [self.main_memory - main] if main is not None else []
        return max(too_many, default=0)


def make_plan(config: CommonConfig, machine: Machine, configs: Configs) -> Plan:
    """Plans a run.

    Args:
        config: its flags.
        machine: what it has.
        configs: (path, flag) → a model's config.

    Raises:
        UserError: a model's config cannot be read, or the batch sizes do not fit together.
    """
    batches = config.plan_batches(machine.processes)
    roles = roles_of(config, configs, machine.device)
    phases = phases_of(config, batches, roles, machine)
    average = isinstance(config, PPOConfig) and config.enable_ema
    return Plan(config, machine, tuple(roles), tuple(phases), host_of(roles, machine, average))
