# SPDX-License-Identifier: Apache-2.0
"""Flags of how many processes train, and on which machines."""

from dataclasses import dataclass

from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, FREE, flag


@dataclass(kw_only=True, frozen=True)
class LaunchFlags:
    """Processes and machines; under a launcher they do nothing."""

    section = "processes and machines"

    num_gpus: int | None = flag(
        "processes on each machine; the GPUs of CUDA_VISIBLE_DEVICES or nvidia-smi, or 1, if not given",
        None,
        AT_LEAST_1,
        FREE,
        environment="NUM_GPUS",
    )
    hostfile: str | None = flag(
        'several machines with ssh: file of lines of "name slots=8"',
        None,
        on_resume=FREE,
        environment="HOSTFILE",
        path=True,
    )
    num_nodes: int = flag(
        "several machines without ssh: how many; start the command on each",
        1,
        AT_LEAST_1,
        FREE,
        environment="NUM_NODES",
    )
    node_rank: int | None = flag("which of them this is, from 0", None, AT_LEAST_0, FREE, environment="NODE_RANK")
    master_addr: str | None = flag("address of the first of them", None, on_resume=FREE, environment="MASTER_ADDR")
    master_port: int = flag(
        "port of the launcher, for several runs on one machine", 29500, AT_LEAST_1, FREE, environment="MASTER_PORT"
    )
