# SPDX-License-Identifier: Apache-2.0
"""What this process is for the cluster that started it, by the cluster's own environment variables.

| started by | variables | this process is |
|---|---|---|
| dschat, torchrun, accelerate, DeepSpeed | RANK, LOCAL_RANK, WORLD_SIZE | a rank |
| mpirun | OMPI_COMM_WORLD_…, PMI_… | a rank |
| srun, one task per GPU | SLURM_STEP_NUM_TASKS above SLURM_STEP_NUM_NODES | a rank |
| srun, one task per machine | SLURM_STEP_NUM_TASKS = SLURM_STEP_NUM_NODES, above 1 | a machine |
| PyTorchJob, TrainJob | PET_NNODES, PET_NODE_RANK | a machine |
| PyTorchJob without PET_… | RANK, WORLD_SIZE, MASTER_ADDR | a machine |

The first row that fits counts: mpirun starts its processes by srun, or inside of a Slurm job. A rank trains; a machine
starts one rank per GPU (dschat/launch.py). What says that several processes belong together, but not which one this
is, is refused: else each of them would train a model of its own.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dschat.base.errors import UserError

WORKER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # set by every launcher of ranks
# Open MPI's, and PMI's with the local ones of Hydra (MPICH, Intel MPI).
MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
LOCALHOST = "127.0.0.1"
NODE_NAME = re.compile(r"(?:[^\[,]|\[[^\]]*\])+")  # up to a comma outside of brackets
NODE_NUMBERS = re.compile(r"\[(?P<first>\w+)[^\]]*\]")
REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Rank:
    """One training process of a run.

    Attributes:
        rank: its number in the run.
        local_rank: its number on its machine.
        world_size: processes of the run.
        local_size: processes of the run on this machine.
        master_addr: address of the machine of rank 0; None if the cluster does not say it.
        source: what says so, for messages.
    """

    rank: int
    local_rank: int
    world_size: int
    local_size: int
    master_addr: str | None
    source: str

    def variables(self, master_addr: str, master_port: int) -> dict[str, str]:
        """The variables from which torch and DeepSpeed read what this process is."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_size),  # torchrun's name
            "LOCAL_SIZE": str(self.local_size),  # DeepSpeed's name
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(master_port),
        }


@dataclass(frozen=True)
class ClusterNode:
    """One of several machines, on each of which the cluster has started one command.

    Attributes:
        number: its number, from 0.
        count: number of machines.
        processes: training processes per machine; None if the cluster does not say it.
        master_addr: address of machine 0; None if the cluster does not say it.
        master_port: port on machine 0; None if the cluster does not say it.
        source: what says so, for messages.
    """

    number: int
    count: int
    processes: int | None
    master_addr: str | None
    master_port: int | None
    source: str


def is_worker(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of ranks has started this process."""
    return all(name in environ for name in WORKER_VARIABLES)


def process_of(environ: Mapping[str, str]) -> Rank | ClusterNode | None:
    """What a cluster says of this process; None if it stands alone, or a launcher of ranks has started it.

    Raises:
        UserError: it belongs to several processes, but the variables do not say which one it is, or torchrun has
            started ranks in each of them that do not know of each other.
    """
    if is_worker(environ):
        if environ.get("GROUP_WORLD_SIZE") == "1":  # ranks of a single torchrun
            _check_single_torchrun(environ)
        return None
    is_slurm = "SLURM_JOB_ID" in environ
    for names in MPI_VARIABLES:
        # srun sets PMI_SIZE, too, but no number on the machine.
        if read_number(environ, names[2]) > 1 and (names[1] in environ or not is_slurm):
            return _of_mpi(environ, names)
    if is_slurm:
        return _of_slurm(environ)
    return _of_kubernetes(environ)


def _check_single_torchrun(environ: Mapping[str, str]) -> None:
    """Raises UserError if a cluster has started several torchrun (or accelerate), and this one does not know them."""
    outside = {name: value for name, value in environ.items() if name not in WORKER_VARIABLES}
    cluster = process_of(outside)
    if cluster is not None:
        raise UserError(
            f"{cluster.source} starts several processes, in each of which torchrun would train a model of its own:"
            " give torchrun --nnodes, --node_rank and --master_addr, or start `dschat` without torchrun. Several runs"
            " in one job need an srun or mpirun each."
        )


def check_alone(environ: Mapping[str, str]) -> None:
    """Raises UserError in a batch script of several machines, of which the others would have nothing to do."""
    machines = read_number(environ, "SLURM_JOB_NUM_NODES")
    # srun sets SLURM_STEP_…; the shell of salloc may be on no machine of the job, and has no SLURM_NODEID.
    is_batch_script = "SLURM_NODEID" in environ and "SLURM_STEP_NUM_TASKS" not in environ
    if machines > 1 and is_batch_script and not is_worker(environ):
        raise UserError(
            f"SLURM_JOB_NUM_NODES={machines}, but this command was started on one machine of the job alone: start it"
            " with `srun --ntasks-per-node=1 dschat …`, or give --num_nodes 1 to train on this machine alone."
        )


def _of_slurm(environ: Mapping[str, str]) -> Rank | ClusterNode | None:
    tasks = read_number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks == 1:
        return None
    machines = read_number(environ, "SLURM_STEP_NUM_NODES")
    source = f"srun (SLURM_STEP_NUM_TASKS={tasks}, SLURM_STEP_NUM_NODES={machines})"
    machine = _needed(environ, "SLURM_NODEID", source)
    master_addr = first_name(environ.get("SLURM_STEP_NODELIST", ""))
    if tasks == machines:
        return ClusterNode(machine, machines, None, master_addr, None, source)
    tasks_of_machine = expand_repeated(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if machine >= len(tasks_of_machine):
        raise UserError(f"{source}: SLURM_STEP_TASKS_PER_NODE does not say how many tasks machine {machine} has.")
    return Rank(
        rank=_needed(environ, "SLURM_PROCID", source),
        local_rank=_needed(environ, "SLURM_LOCALID", source),
        world_size=tasks,
        local_size=tasks_of_machine[machine],
        master_addr=master_addr if machines > 1 else LOCALHOST,
        source=source,
    )


def _of_mpi(environ: Mapping[str, str], names: tuple[str, str, str, str]) -> Rank:
    rank_name, local_rank_name, size_name, local_size_name = names
    source = f"mpirun ({size_name}={environ[size_name]})"
    world_size = _needed(environ, size_name, source)
    local_size = _needed(environ, local_size_name, source)
    return Rank(
        rank=_needed(environ, rank_name, source),
        local_rank=_needed(environ, local_rank_name, source),
        world_size=world_size,
        local_size=local_size,
        master_addr=LOCALHOST if local_size == world_size else None,
        source=source,
    )


def _of_kubernetes(environ: Mapping[str, str]) -> ClusterNode | None:
    """A pod of a PyTorchJob or TrainJob.

    PET_… are torchrun's flags. With them WORLD_SIZE counts processes; without them RANK and WORLD_SIZE count pods.
    """
    has_flags = "PET_NNODES" in environ
    count_name = "PET_NNODES" if has_flags else "WORLD_SIZE"
    count = read_number(environ, count_name)
    if count <= 1:
        return None
    source = f"{count_name}={count}"
    processes = environ.get("PET_NPROC_PER_NODE", "")
    return ClusterNode(
        number=_needed(environ, "PET_NODE_RANK" if has_flags else "RANK", source),
        count=count,
        processes=int(processes) if processes.isdecimal() else None,
        master_addr=environ.get("PET_MASTER_ADDR"),
        master_port=read_number(environ, "PET_MASTER_PORT", 0) or None,
        source=source,
    )


def read_number(environ: Mapping[str, str], name: str, default: int = 1) -> int:
    """A variable's number; the default if it is not set. Raises UserError if it is no number."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise UserError(f"{name}={text} is not a number: correct the variable, or unset it.")
    return int(text)


def _needed(environ: Mapping[str, str], name: str, source: str) -> int:
    """A variable's number. Raises UserError if it is not set."""
    if not environ.get(name, "").strip():
        raise UserError(
            f"{source} says that several processes train together, but {name} is not set, so that this one cannot know"
            f" which it is: set {name}, or unset {source.partition('=')[0].rpartition('(')[2]} to train alone."
        )
    return read_number(environ, name)


def expand_repeated(text: str) -> list[int]:
    """Slurm's numbers per machine: "2(x3),1" is [2, 2, 2, 1]."""
    numbers: list[int] = []
    for count, times in REPEATED.findall(text):
        numbers += [int(count)] * int(times or 1)
    return numbers


def first_name(names: str) -> str | None:
    """The first name of Slurm's list of machines, such as "node[01-03,07],login": node01; None if it is empty."""
    match = NODE_NAME.match(names)
    return NODE_NUMBERS.sub(r"\g<first>", match[0]) if match else None


def adopt(rank: Rank, master_addr: str | None, master_port: int) -> None:
    """Sets this process's variables to those of a rank, as a launcher of ranks would have.

    Args:
        rank: what the cluster says.
        master_addr: address that the user gives for rank 0; None: the cluster's.
        master_port: port on which rank 0 listens.

    Raises:
        UserError: nobody says on which machine rank 0 is.
    """
    address = master_addr or rank.master_addr
    if address is None:
        raise UserError(
            f"{rank.source}: MASTER_ADDR is missing. Give every process the address of the machine of rank 0, with"
            " Open MPI by `mpirun -x MASTER_ADDR=…`."
        )
    os.environ.update(rank.variables(address, master_port))
    # torch and DeepSpeed take LOCAL_RANK for the number of the GPU among the visible ones.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and "," not in visible:
        os.environ["LOCAL_RANK"] = "0"
