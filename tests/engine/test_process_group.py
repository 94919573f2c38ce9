# SPDX-License-Identifier: Apache-2.0
"""Joining the group of processes, and what DeepSpeed says and compiles."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import cpp_extension

from cli_runs import run_command
from dschat.base.errors import UserError
from dschat.engine import interface, process_group
from dschat.engine.process_group import prepare_op
from dschat.main import report_error
from dschat.run import distributed
from factories import engine_of, make_causal_lm


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            dist.DistNetworkError("listen: EADDRINUSE, address already in use"),
            "--master_port 29511: another run listens",
        ),
        (dist.DistStoreError("Timed out after 9 seconds waiting for clients. 1/4 clients joined"), "not all of the 4"),
    ],
)
def test_processes_that_do_not_meet_are_told_of_their_flags(error, said, monkeypatch, caplog):
    place = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said), process_group._explain_rendezvous(9):
        raise error
    assert caplog.messages == ["waiting up to 9 s for the 4 processes of all machines at 10.0.0.1:29511"]
    monkeypatch.setenv("LOCAL_SIZE", "4")
    caplog.clear()
    with process_group._explain_rendezvous(9):
        assert not caplog.messages  # all are on this machine


@pytest.mark.parametrize(
    ("hostname_address", "own_address", "interfaces", "chosen"),
    [
        ("fe80::1%eth0", "10.0.0.2", "eth0 eth1", "eth1"),  # on the way to rank 0
        ("127.0.1.1", "127.0.0.1", "eth1", "eth1"),  # rank 0's machine, by its own name
        ("10.9.0.1", "10.0.0.2", "eth0 eth1", None),  # gloo's own choice can be reached
    ],
)
def test_the_interface_of_a_hostname_that_only_its_machine_can_reach(
    hostname_address, own_address, interfaces, chosen, two_machines
):
    two_machines(hostname_address, own_address, interfaces)
    interface.choose_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen
    os.environ["GLOO_SOCKET_IFNAME"] = "mine"
    interface.choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


@pytest.mark.parametrize(("own_address", "interfaces"), [("10.7.0.1", "eth0"), ("127.0.0.1", "eth0 eth1")])
def test_an_interface_that_is_not_known(own_address, interfaces, two_machines):
    two_machines("127.0.1.1", own_address, interfaces)
    with pytest.raises(UserError, match=r"resolves to 127\.0\.1\.1, .* set GLOO_SOCKET_IFNAME to it, of "):
        interface.choose_interface()


@pytest.fixture
def two_machines(monkeypatch):
    """two_machines(address of the hostname, address on the way to rank 0, names of interfaces)."""
    addresses = {"eth0": "10.9.0.1", "eth1": "10.0.0.2"}
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that the fixture restores it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    def made(hostname_address, own_address, interfaces):
        outside = [(name, addresses[name]) for name in interfaces.split()]
        monkeypatch.setattr(interface, "address_of_hostname", lambda: hostname_address)
        monkeypatch.setattr(interface, "address_towards", lambda host: own_address)
        monkeypatch.setattr(interface, "outside_interfaces", lambda: outside)

    return made


@pytest.fixture
def joins(monkeypatch):
    """The interface at each joining of a group, which does nothing else."""
    interfaces = []

    def meet(**options):
        interfaces.append(os.environ.get("GLOO_SOCKET_IFNAME"))

    monkeypatch.setattr(process_group.deepspeed, "init_distributed", meet)
    monkeypatch.setattr(process_group, "make_host_groups", lambda *_: None)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):  # back to what they are after the test
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    return interfaces


@pytest.mark.parametrize(("processes_here", "chosen"), [("1", "eth1"), ("2", None)])
def test_the_interface_is_chosen_before_machines_meet(processes_here, chosen, two_machines, joins, monkeypatch):
    two_machines("127.0.1.1", "10.0.0.2", "eth0 eth1")
    for name, value in {"MASTER_PORT": "29511", "WORLD_SIZE": "2", "LOCAL_SIZE": processes_here}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    process_group._join_group(9, 9)
    assert joins == [chosen]


def test_groups_without_a_timeout_of_their_own_wait_as_long_as_the_run(group, joins):
    """As those that DeepSpeed makes."""
    process_group._join_group(7, 9)
    made = dist.new_group([0])._get_backend(torch.device("cpu"))
    assert made.options._timeout == distributed_c10d.default_pg_nccl_timeout == timedelta(seconds=7)


def test_a_process_that_has_gone_is_named_with_a_remedy(capsys, monkeypatch):
    """What gloo says, word for word."""
    place = "[/gloo/transport/tcp/pair.cc:556]"
    error = RuntimeError(f"Application timeout caused pair closure\n{place} Connection closed by peer [10.0.0.2]:5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert report_error(error, []) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "another process of this run has gone or hangs" in last and "--resume_from_checkpoint" in last
    assert last.endswith("(RuntimeError: Application timeout caused pair closure)")
    assert report_error(ConnectionResetError("Connection reset by peer"), []) == 1
    assert "another process" not in capsys.readouterr().err.splitlines()[-1]


def test_an_engine_in_bf16_prints_nothing(group, capfd):
    engine_of(make_causal_lm().to(torch.bfloat16), dtype=torch.bfloat16)
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_a_group_of_one_compiles_no_test_programs(tmp_path):
    """A process without captured output, as a user's: nothing on either stream."""
    program = tmp_path / "program.py"
    program.write_text(
        "import deepspeed.ops.op_builder.builder as b\n"
        "def has_function(*a, **k): print('probed', a)\n"
        "b.OpBuilder.has_function = has_function\n"
        "from dschat.engine.process_group import process_group\n"
        "with process_group(): pass\n"
    )
    done = run_command([sys.executable, program], DS_ACCELERATOR="cpu").expect(0)
    assert "probed" not in done.stdout and "laio" not in done.stderr


def test_a_group_that_cannot_be_joined_leaves_nothing_behind(monkeypatch):
    """The next one in this process does not take itself for a launcher's."""

    def fail(timeout, save_timeout):
        raise OSError("no network")

    for name in process_group.LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process_group, "_join_group", fail)
    with pytest.raises(OSError, match="no network"), process_group.process_group():
        raise AssertionError("not joined")
    assert not set(process_group.LAUNCH_VARIABLES) & os.environ.keys()


def test_a_group_of_one_leaves_the_variables_of_a_cluster(monkeypatch):
    """Without a rank, the address and the number of processes are somebody else's."""
    variables = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "4"}
    monkeypatch.delenv("RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_group, "_join_group", lambda timeout, save_timeout: None)
    monkeypatch.setattr(process_group.dist, "barrier", lambda: None)
    with process_group.process_group():
        assert os.environ["WORLD_SIZE"] == "1"
    assert {name: os.environ[name] for name in variables} == variables and "RANK" not in os.environ


@pytest.mark.parametrize(("rank", "ranks"), [(0, [0, 1]), (3, [2, 3])])
def test_neighbours_of_a_rank(rank, ranks, monkeypatch):
    """Of six ranks in pairs; each rank makes the groups of all ranks, as torch.distributed wants it."""
    made = []

    def new_group(members, backend):
        made.append(members)
        return members

    monkeypatch.setattr(distributed, "world_size", lambda: 6)
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(dist, "new_group", new_group)
    assert distributed.neighbours(2) == ranks and made == [[0, 1], [2, 3], [4, 5]]


@pytest.fixture
def build_folder(tmp_path, monkeypatch):
    """Where torch compiles cpu_adam in this test."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Path(cpp_extension._get_build_directory("cpu_adam", verbose=False))


def test_the_lock_of_a_process_that_compiles_stays_and_that_of_a_killed_one_goes(build_folder, caplog):
    with open(build_folder / "lock", "x"):
        prepare_op("cpu_adam")
        assert (build_folder / "lock").exists()
    prepare_op("cpu_adam")
    assert not (build_folder / "lock").exists()
    assert "the lock of a compilation that was killed" in caplog.text and str(build_folder) in caplog.text


@pytest.mark.parametrize("local", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])
def test_another_machine_may_hold_a_young_lock(local, build_folder, monkeypatch):
    """By the variables of torchrun, and of DeepSpeed's launcher."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(local, "2")
    (build_folder / "lock").touch()
    prepare_op("cpu_adam")
    assert (build_folder / "lock").exists()
    os.utime(build_folder / "lock", (1, 1))
    prepare_op("cpu_adam")
    assert not (build_folder / "lock").exists()


def test_a_build_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cpu_adam cannot be compiled: .*Set TORCH_EXTENSIONS_DIR"):
        prepare_op("cpu_adam")
