# SPDX-License-Identifier: Apache-2.0
"""Flags of how many processes train, and on which machines."""

from dataclasses import dataclass

from dschat.settings.flags import AT_LEAST_0, AT_LEAST_1, FREE, PORT, flag


@dataclass(kw_only=True, frozen=True)
class LaunchFlags:
    """Processes and machines; under a launcher they do nothing."""

    section = "processes and machines"

    num_gpus: int | None = flag(
        "processes per machine, one per GPU; if not given, the GPUs in CUDA_VISIBLE_DEVICES or from nvidia-smi, or 1",
        None,
        AT_LEAST_1,
        FREE,
        environment="NUM_GPUS",
    )
    hostfile: str | None = flag(
        'several machines over ssh: file with lines like "name slots=8"',
        None,
        on_resume=FREE,
        environment="HOSTFILE",
        path=True,
    )
    num_nodes: int | None = flag(
        "several machines without ssh: number of machines; start the command on each of them. If not given, what the"
        " cluster says (Slurm, PyTorchJob), or 1",
        None,
        AT_LEAST_1,
        FREE,
        environment="NUM_NODES",
    )
    node_rank: int | None = flag("number of this machine, from 0", None, AT_LEAST_0, FREE, environment="NODE_RANK")
    master_addr: str | None = flag("address of machine 0", None, on_resume=FREE, environment="MASTER_ADDR")
    master_port: int = flag(
        "port on which rank 0 listens, the same on all machines; a run on one machine takes a free one instead of the"
        " default",
        29500,
        PORT,
        FREE,
        environment="MASTER_PORT",
    )
    log_dir: str | None = flag(
        "folder for a file of the output of each rank, rank-0.log and so on, where dschat starts the ranks; new output"
        " is added to files that exist",
        None,
        on_resume=FREE,
        path=True,
    )
