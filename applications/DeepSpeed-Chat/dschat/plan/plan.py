# SPDX-License-Identifier: Apache-2.0
"""The plan of a run: its models, its phases and main memory, and whether they fit the machine."""

from __future__ import annotations

from dataclasses import dataclass

from dschat.plan.disk import Disk, disk_of
from dschat.plan.models import ConfigLoader, Role, roles_of
from dschat.plan.phases import CUDA_BYTES, Host, Machine, Phase, host_of, phases_of
from dschat.refuel.online_settings import RefuelOnlineConfig
from dschat.settings.common import CommonConfig
from dschat.settings.ppo import PPOConfig


@dataclass(frozen=True)
class Plan:
    """The memory that a run needs, and the memory of its machine."""

    config: CommonConfig
    machine: Machine
    roles: tuple[Role, ...]  # its models
    phases: tuple[Phase, ...]  # in the order of an iteration
    host: Host  # main memory of a node
    disk: Disk  # what the run writes

    @property
    def worst(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes on the device of a process, CUDA's own included."""
        return self.worst.total + (0 if self.machine.device_memory is None else CUDA_BYTES)

    @property
    def main_memory(self) -> int:
        """Bytes of main memory of a node; without GPUs the processes compute there."""
        computing = self.machine.on_a_node * self.worst.total if self.machine.device_memory is None else 0
        return self.host.total + computing

    @property
    def sampling_actor(self) -> int:
        """Bytes of the actor's weights that each GPU holds during sampling; 0 in steps that do not sample.

        All of them, except that vLLM divides them among neighbours, and vLLM servers hold them on other GPUs.
        """
        actor = self.roles[0].weights
        config = self.config
        if isinstance(config, PPOConfig):
            return 0 if config.vllm.vllm_url else -(-actor.whole // config.vllm.vllm_tensor_parallel)
        return actor.whole if isinstance(config, RefuelOnlineConfig) else 0

    @property
    def fits_device(self) -> bool:
        """Whether a GPU is large enough."""
        return self.machine.device_memory is None or self.peak <= self.machine.device_memory

    @property
    def fits_host(self) -> bool:
        """Whether main memory is large enough, if its size is known."""
        return self.machine.main_memory is None or self.main_memory <= self.machine.main_memory

    @property
    def fits(self) -> bool:
        """Whether the run is possible."""
        return self.fits_device and self.fits_host

    @property
    def excess(self) -> int:
        """Bytes that are missing, on a GPU or in main memory; negative if there is room."""
        missing = []
        if self.machine.device_memory is not None:
            missing.append(self.peak - self.machine.device_memory)
        if self.machine.main_memory is not None:
            missing.append(self.main_memory - self.machine.main_memory)
        return max(missing, default=0)


def make_plan(config: CommonConfig, machine: Machine, load_config: ConfigLoader) -> Plan:
    """Plans a run with these settings.

    Raises:
        UserError: a model's config cannot be read, or the batch sizes do not fit together.
    """
    batches = config.plan_batches(machine.processes)
    roles = roles_of(config, batches, load_config, machine.device)
    phases = phases_of(config, batches, roles, machine)
    return Plan(
        config,
        machine,
        tuple(roles),
        tuple(phases),
        host_of(roles, machine, config.keeps_average),
        disk_of(config, roles, machine.processes),
    )
