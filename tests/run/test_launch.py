# SPDX-License-Identifier: Apache-2.0
"""Which processes are started: GPUs of this machine, several machines, and what does not fit together."""

import os
import signal
import socket
from pathlib import Path
from threading import Event

import pytest

from dschat import launch, ranks
from dschat.base.errors import UserError
from dschat.cluster import Rank, process_of
from dschat.launch import LaunchPlan, check_against_rank, plan_launch, variables_of_ranks, worker_environment
from dschat.remote import launcher_variables
from dschat.settings.processes import LaunchFlags

NVIDIA_SMI = """#!/bin/sh
cat <<'END'
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
  MIG 1g.10gb     Device  0: (UUID: MIG-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
END
"""
HERE = {"node_rank": 0, "master_addr": "10.0.0.1"}
PORT = ["--master_port", "29500"]
PORT_HERE = {"master_port": 29501}


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """A folder of programs that come first, with a driver of two GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    driver = tmp_path / "nvidia-smi"
    driver.write_text(NVIDIA_SMI)
    driver.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("how", ["there", "gone", "unset"])
def test_a_process_stops_once_what_started_it_is_gone(how, monkeypatch):
    """By SIGTERM, also where that has gone before the process looks. What the process starts does not follow."""
    input_of_rank, held_open = os.pipe()
    monkeypatch.setattr(launch.os, "read", lambda file, size, read=os.read: read(input_of_rank, size))
    sent = Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: sent.set())
    monkeypatch.setenv(launch.FOLLOWS_LAUNCHER, "" if how == "unset" else "1")
    if how == "gone":
        os.close(held_open)
    launch.follow_launcher()
    assert launch.FOLLOWS_LAUNCHER not in os.environ
    assert sent.wait(5 if how == "gone" else 0.2) is (how == "gone")
    if how != "gone":
        os.close(held_open)
    assert sent.wait(0.2 if how == "unset" else 5) is (how != "unset")
    signal.signal(signal.SIGTERM, before)
    os.close(input_of_rank)


def hosts_of(content):
    """The path of a list of machines, for --hostfile."""
    Path("hosts").write_text(content)
    return "hosts"


def started(**flags):
    machine = process_of(os.environ)
    assert not isinstance(machine, Rank)
    return plan_launch(LaunchFlags(**flags), machine)


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),  # nvidia-smi's, without the parts of a GPU
        ("", 1),
        ("4,5,6,7", 4),
    ],
)
def test_gpus_are_found(visible, count, programs, monkeypatch):
    """The ranks inherit the variable; each takes the visible GPU of its number."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert started(**PORT_HERE) == LaunchPlan(count, count, master_port=29501)


def test_runs_on_one_machine_take_free_ports():
    """Unless one is given: two runs that start together would otherwise join each other."""
    plans = [started(num_gpus=1), started(num_gpus=1)]
    assert 29500 not in [plan.master_port for plan in plans]
    assert started(num_gpus=1, num_nodes=1, node_rank=0, **PORT_HERE) == LaunchPlan(1, 1, master_port=29501)


def test_some_of_the_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert started(num_gpus=2, master_port=29501) == LaunchPlan(2, 2, master_port=29501)
    with pytest.raises(UserError, match="--num_gpus 4 .* CUDA_VISIBLE_DEVICES=4,6,7 names fewer"):
        started(num_gpus=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="hosts: 8 ranks, but CUDA_VISIBLE_DEVICES=0,1 names fewer"):
        started(hostfile=hosts_of("first slots=8\nsecond slots=8\n"))


@pytest.mark.parametrize("visible", ["0,,1", "all", "0,-1"])
def test_gpus_that_cannot_be_counted(visible, monkeypatch):
    """CUDA would show fewer, or none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match="is no GPU; .*such as CUDA_VISIBLE_DEVICES=0,1"):
        started()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=0,0 names a GPU twice"):
        started()


@pytest.mark.parametrize("visible", ["4,5", "GPU-1,GPU-2"])
def test_which_gpus_several_machines_use(visible, tmp_path, monkeypatch):
    """Those of the variable; DeepSpeed's launcher, which reaches machines by ssh, numbers them from 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert started(num_nodes=2, **HERE) == LaunchPlan(4, 2, 0, "10.0.0.1")
    hosts = hosts_of("first slots=2\nsecond slots=2\n")
    with pytest.raises(UserError, match=f"CUDA_VISIBLE_DEVICES={visible}: over ssh DeepSpeed's launcher"):
        started(hostfile=hosts)


def test_machines_with_ssh(tmp_path):
    """Slots are counted; a number of processes takes their process."""
    hosts = hosts_of("# ours\n\nfirst slots=8\nsecond slots=8  # the slow one")
    found = started(hostfile=hosts)
    assert (found.world_size, found.ssh_hosts) == (16, ("first", "second"))
    assert found.ssh_options == ("--hostfile", hosts, *PORT)
    found = started(hostfile=hosts, num_gpus=4)
    assert (found.world_size, found.ssh_options) == (8, ("--hostfile", hosts, *PORT, "--num_gpus", "4"))
    found = started(hostfile=hosts, master_addr="10.0.0.1")
    assert found.ssh_options == ("--hostfile", hosts, *PORT, "--master_addr", "10.0.0.1")


BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}  # of a script of two machines


def test_a_batch_script_of_several_machines(tmp_path, monkeypatch):
    """It must say that one machine is enough, or which ones are used."""
    for name, value in BATCH.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="SLURM_JOB_NUM_NODES=2, .* machine of the job alone: start .* --num_nodes 1"):
        started()
    assert started(num_nodes=1, **PORT_HERE) == LaunchPlan(2, 2, master_port=29501)
    assert started(num_nodes=2, **HERE) == LaunchPlan(4, 2, 0, "10.0.0.1")
    hosts = hosts_of("first slots=2\nsecond slots=2\n")
    assert started(hostfile=hosts).world_size == 4


def test_machines_without_ssh(tmp_path):
    assert started(num_nodes=2, num_gpus=8, node_rank=1, master_addr="10.0.0.1") == LaunchPlan(16, 8, 8, "10.0.0.1")
    with pytest.raises(UserError, match="--num_nodes 2: give the address of the first machine, --master_addr"):
        started(num_nodes=2, num_gpus=8, node_rank=1)
    hosts = hosts_of("first slots=2\nsecond slots=4\nthird slots=3\n")
    with pytest.raises(UserError, match="hosts names 3 machines, which are started from this one: leave --num_nodes"):
        started(hostfile=hosts, node_rank=2, master_addr="10.0.0.1")


def test_the_variables_of_ranks():
    """Two of six ranks, on the second of three machines."""
    first, second = variables_of_ranks(LaunchPlan(6, 2, 2, "10.0.0.1", 7))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [first[name] for name in names] == ["2", "0", "6", "2", "2", "10.0.0.1", "7"]
    assert [second[name] for name in names] == ["3", "1", "6", "2", "2", "10.0.0.1", "7"]


POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
SLURM |= {"SLURM_STEP_NODELIST": "job-0,job-1"}
TRAIN_JOB = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "3"}
TRAIN_JOB |= {"PET_MASTER_ADDR": "job-1", "PET_MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    ("variables", "flags", "expected"),
    [
        (POD, {"master_addr": "job-0"}, LaunchPlan(4, 2, 2, "job-0")),  # as the variable gives it to the flag
        (SLURM, {}, LaunchPlan(4, 2, 2, "job-0")),
        (SLURM, {"num_gpus": 1, "master_port": 7}, LaunchPlan(2, 1, 1, "job-0", 7)),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "3"},
            {"master_addr": "a"},
            LaunchPlan(6, 3, 3, "a"),
        ),
        (TRAIN_JOB, {}, LaunchPlan(6, 3, 3, "job-1", 29400)),
        (TRAIN_JOB, {"master_port": 7}, LaunchPlan(6, 3, 3, "job-1", 7)),
        (TRAIN_JOB, {"master_addr": "a", "master_port": 23456}, LaunchPlan(6, 3, 3, "a", 23456)),
    ],
)
def test_machines_of_a_cluster(variables, flags, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert started(**flags) == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"num_nodes": 1},
            r"--num_nodes 1 \(NUM_NODES\), but srun .* starts this command on 2 machines, of which this is number",
        ),
        ({"hostfile": "hosts"}, "--hostfile hosts .*, but srun .* on 2 machines"),
    ],
)
def test_flags_against_a_cluster(flags, said, monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said):
        started(**flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_nodes": 2}, r"--num_nodes 2 \(NUM_NODES\), but srun starts every rank itself, 2 on this machine"),
        ({"num_gpus": 4}, "--num_gpus 4 .*, but srun"),
        ({"node_rank": 1}, "--node_rank 1 .*, but srun"),
        ({"hostfile": "hosts"}, "--hostfile hosts .*, but srun"),
        ({"log_dir": "logs"}, "--log_dir logs, but srun starts every rank itself"),
    ],
)
def test_flags_of_a_process_that_is_one_rank(flags, said):
    rank = Rank(3, 1, 4, 2, "a", "srun")
    check_against_rank(LaunchFlags(num_gpus=2, num_nodes=1), rank)
    with pytest.raises(UserError, match=said):
        check_against_rank(LaunchFlags(**flags), rank)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"f\xfcrst slots=8\n", "is not in UTF-8: save the file in that encoding"),
        (b"# nobody\n", "names no machine"),
        (b"first slots=8\nsecond\n", 'the line of second must be like "second slots=8"'),
        (b"first slots=8\nfirst slots=4\n", "names first twice"),
    ],
)
def test_a_bad_hostfile(content, message):
    if content is not None:
        Path("hosts").write_bytes(content)
    with pytest.raises(UserError, match=f"--hostfile hosts.*{message}"):
        started(hostfile="hosts")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"num_nodes": 2, "node_rank": 2, "master_addr": "10.0.0.1"},
            "--node_rank 2 with --num_nodes 2 .*; the last one has number 1",
        ),
        (HERE, "--node_rank 0 with --num_nodes 1 .*: give the number of machines"),
    ],
)
def test_what_several_machines_need(flags, message):
    with pytest.raises(UserError, match=message):
        started(**flags)


def test_what_a_process_of_a_launcher_reads(monkeypatch):
    """The launcher's variables are about its own machines; those of a preset are about the run."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("NUM_NODES", "2")
    monkeypatch.setenv("DATA", "rows.jsonl")
    known = worker_environment()
    assert known["DATA"] == "rows.jsonl" and not {"MASTER_ADDR", "NUM_NODES"} & {*known}


def test_variables_of_deepspeeds_own_file(tmp_path, monkeypatch):
    """With comments and empty lines; a file by its whole path is read once."""
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "told"))
    (tmp_path / "told").write_text("A=1\n\n# ours\n B = 2")
    assert launcher_variables() == {"A": "1", "B": "2"}
    for wrong in ("export", "=2"):
        (tmp_path / "told").write_text(f"A=1\n{wrong}\n")
        with pytest.raises(UserError, match="told:2: the line is not NAME=value"):
            launcher_variables()
    (tmp_path / "told").write_bytes(b"A=\xff")
    with pytest.raises(UserError, match="told is not in UTF-8"):
        launcher_variables()


def test_a_port_on_which_another_run_listens_is_refused_before_processes_start(monkeypatch):
    """Else a process of this run may join the other one before this run's first process finds the port in use."""
    monkeypatch.setattr(ranks, "run_ranks", lambda command, environments, signals, first_rank, log_dir: 42)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"--master_port {port} .*Address already in use"):
            launch.launch(started(num_gpus=2, master_port=port), ["ppo"])
        second = started(num_gpus=2, num_nodes=2, node_rank=1, master_addr="first", master_port=port)
        assert launch.launch(second, ["ppo"]) == 42
    assert launch.launch(started(num_gpus=2, master_port=port), ["ppo"]) == 42


def test_the_folder_of_logs(monkeypatch, tmp_path):
    """It is made; where dschat does not start the ranks itself, the flag is refused."""
    folders = []
    monkeypatch.setattr(ranks, "run_ranks", lambda *arguments: folders.append(arguments[-1]) or 0)
    assert launch.launch(LaunchPlan(2, 2, 2), ["ppo"], str(tmp_path / "a" / "b")) == 0
    assert folders == [tmp_path / "a" / "b"] and folders[0].is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--log_dir .*file cannot be made: File exists"):
        launch.launch(LaunchPlan(2, 2, 2), ["ppo"], str(tmp_path / "file"))
    with pytest.raises(UserError, match="--log_dir logs does not reach the machines of --hostfile"):
        started(log_dir="logs", hostfile=hosts_of("first slots=1\nsecond slots=1\n"))


def test_the_message_of_the_first_failure_comes_last(monkeypatch, capsys):
    def fail(command, environments, signals, first_rank, log_dir):
        assert command[1:] == ["-m", "dschat", "ppo"] and len(environments) == 2
        with open(environments[1][launch.ERROR_FILE], "w") as file:
            file.write("error: the reward function\n")
        return 2

    monkeypatch.setattr(ranks, "run_ranks", fail)
    assert launch.launch(LaunchPlan(2, 2, 2), ["ppo"]) == 2
    assert capsys.readouterr().err == "error: the reward function\n"
