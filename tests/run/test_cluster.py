# SPDX-License-Identifier: Apache-2.0
"""What a process is for the cluster that started it, by the variables that the clusters document."""

import os

import pytest

from dschat.base.errors import UserError
from dschat.cluster import ClusterNode, Rank, adopt, check_alone, expand_repeated, first_name, process_of

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}
STEP = SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_NODEID": "1"}
PER_GPU = STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
PER_GPU |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
PER_MACHINE = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
HYDRA = {"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
TRAIN_JOB = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "job-0"}
TRAIN_JOB |= {"PET_MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, None),  # a launcher of ranks has done it
        (PER_GPU, (3, 1, 4, 2, "gpu03")),
        (PER_MACHINE | OPEN_MPI, (5, 1, 8, 4, None)),  # mpirun, which starts its own processes by srun
        (SLURM | {"SLURM_NODEID": "0"} | HYDRA, (1, 1, 2, 2, "127.0.0.1")),  # mpirun in a batch script
        (PER_GPU | {"SLURM_STEP_TASKS_PER_NODE": "1,3"}, (3, 1, 4, 3, "gpu03")),
        (PER_GPU | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}, (3, 1, 4, 2, "127.0.0.1")),
        (OPEN_MPI, (5, 1, 8, 4, None)),
        (HYDRA, (1, 1, 2, 2, "127.0.0.1")),
    ],
)
def test_a_rank(environ, expected):
    process = process_of(environ)
    if expected is None:
        assert process is None
    else:
        assert isinstance(process, Rank)
        found = (process.rank, process.local_rank, process.world_size, process.local_size, process.master_addr)
        assert found == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (PER_MACHINE, (1, 2, None, "gpu03", None)),
        (POD, (1, 2, None, None, None)),  # MASTER_ADDR and MASTER_PORT are flags' variables, too
        (TRAIN_JOB, (2, 4, 8, "job-0", 29400)),
        (POD | TRAIN_JOB, (2, 4, 8, "job-0", 29400)),  # the newer operator sets both; WORLD_SIZE then counts processes
    ],
)
def test_a_machine(environ, expected):
    process = process_of(environ)
    assert isinstance(process, ClusterNode)
    assert (process.number, process.count, process.processes, process.master_addr, process.master_port) == expected


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 says that several processes train together, but RANK is not set"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 says .* PET_NODE_RANK is not set, .* unset PET_NNODES to train alone"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "MPI_LOCALNRANKS is not set, .* unset PMI_SIZE to train alone"),
        (PER_GPU | {"SLURM_STEP_TASKS_PER_NODE": ""}, "does not say how many tasks machine 1 has"),
    ],
)
def test_what_would_train_several_models_is_refused(environ, said):
    with pytest.raises(UserError, match=said):
        process_of(environ)


RANK_OF_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("tasks", "source"), [(PER_MACHINE, "srun"), (PER_GPU, "srun"), (OPEN_MPI, "mpirun"), (TRAIN_JOB, "PET_NNODES=4")]
)
def test_torchrun_in_each_of_several_tasks_is_refused_unless_it_joins_them(tasks, source):
    environ = tasks | RANK_OF_TORCHRUN
    with pytest.raises(UserError, match=f"{source}.* starts several processes, in each of which torchrun would train"):
        process_of(environ | {"GROUP_WORLD_SIZE": "1"})
    for joined in ({}, {"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "16"}):  # nothing is known of other launchers
        assert process_of(environ | joined) is None
    assert process_of(RANK_OF_TORCHRUN | {"GROUP_WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "1"},
        {"MASTER_ADDR": "10.0.0.1", "RANK": "0", "WORLD_SIZE": "1"},
        SLURM,  # the shell of salloc
        SLURM | {"SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"},  # a batch script of one machine, whatever its tasks
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"},  # srun --ntasks=1 inside a larger job
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        # One pod of 8 GPUs: the operator's WORLD_SIZE counts processes.
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8", "RANK": "0", "WORLD_SIZE": "8"},
    ],
)
def test_one_process_stands_alone(environ):
    assert process_of(environ) is None
    check_alone(environ)


@pytest.mark.parametrize(("text", "numbers"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("x", [])])
def test_slurms_numbers_per_machine(text, numbers):
    assert expand_repeated(text) == numbers


@pytest.mark.parametrize(
    ("names", "first"), [("node1", "node1"), ("rack[2-3]gpu[01-04],rack9", "rack2gpu01"), ("", None)]
)
def test_the_first_machine_of_slurms_list(names, first):
    assert first_name(names) == first


@pytest.mark.parametrize(
    ("visible", "local_rank"),
    [
        (None, "1"),
        ("0,1", "1"),
        ("0", "0"),  # the cluster lets each task see its own GPU alone
    ],
)
def test_a_rank_takes_its_place(visible, local_rank, monkeypatch):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "")
    adopt(process_of(PER_GPU), None, 29501)
    assert [os.environ[name] for name in names] == ["3", local_rank, "4", "2", "2", "gpu03", "29501"]


def test_a_rank_needs_the_machine_of_rank_0():
    with pytest.raises(UserError, match="MASTER_ADDR is missing"):
        adopt(process_of(OPEN_MPI), None, 29500)
