# SPDX-License-Identifier: Apache-2.0
"""Main memory of a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dschat.models.save import FILE_SIZE
from dschat.plan.machine import Machine
from dschat.plan.models import Role
from dschat.plan.states import averaging, states

PROCESS_BYTES = 3_000_000_000  # a process with torch, DeepSpeed and CUDA's libraries
FILES_AT_A_TIME = 2  # of a model that is saved


@dataclass(frozen=True)
class Host:
    """Bytes of main memory.

    Attributes:
        processes: the programs themselves.
        offload: states and weights that live there.
        average: that of the actor, where its weights are offloaded.
        loading: weights on their way to the device.
        saving: files on the main process.
    """

    processes: int
    offload: int
    average: int
    loading: int
    saving: int

    @property
    def total(self) -> int:
        """At the worst moment: nothing is saved while loading."""
        return self.processes + self.offload + self.average + max(self.loading, self.saving)


def host_of(roles: Sequence[Role], machine: Machine, average: bool) -> Host:
    """Main memory of the node of the main process.

    Args:
        roles: the models.
        machine: that the run has.
        average: --enable_ema.
    """
    trained = [role.weights for role in roles if role.weights.trained]
    saved = max(weights.width * weights.parameters for weights in trained)
    processes, here = machine.processes, machine.on_a_node
    return Host(
        processes=here * PROCESS_BYTES,
        offload=here * sum(states(role.weights, processes).host for role in roles),
        average=here * averaging(roles[0].weights, processes)[1] if average else 0,
        loading=here * max(loading(role) for role in roles),
        saving=min(saved, FILES_AT_A_TIME * FILE_SIZE),
    )


def loading(role: Role) -> int:
    """Bytes of one process while it loads a model: a weight at a time, which goes to its GPU, or is cut at ZeRO 3."""
    return role.weights.width * role.weights.largest
