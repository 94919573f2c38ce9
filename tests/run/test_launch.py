# SPDX-License-Identifier: Apache-2.0
"""Which processes are started: GPUs of this machine, several machines, and what does not fit together."""

import errno
import os
import signal
import socket
import subprocess
import time
from threading import Event

import psutil
import pytest

from dschat import launch
from dschat.base.errors import UserError
from dschat.launch import (
    LauncherSignals,
    is_worker,
    plan_launch,
    worker_environment,
)
from dschat.launch import _launcher_variables as launcher_variables
from dschat.settings.processes import LaunchFlags

NVIDIA_SMI = """#!/bin/sh
cat <<'END'
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
  MIG 1g.10gb     Device  0: (UUID: MIG-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
END
"""
NO_DRIVER = "#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2; exit 9\n"
HERE = {"node_rank": 0, "master_addr": "10.0.0.1"}
PORT = ["--master_port", "29500"]


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """A folder of programs that come first, with a driver of two GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    driver = tmp_path / "nvidia-smi"
    driver.write_text(NVIDIA_SMI)
    driver.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("how", ["there", "gone", "elsewhere", "unset"])
def test_a_process_stops_once_what_started_it_is_gone(how, monkeypatch):
    """By SIGTERM, also where that has gone before the process looks; one of another machine is not followed."""
    starter, sent = subprocess.Popen(["sleep", "60"]), Event()
    monkeypatch.setattr(launch, "LAUNCHER_CHECK_INTERVAL", 0.05)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sent.set())
    machine = "another" if how == "elsewhere" else socket.gethostname()
    monkeypatch.setenv(launch.LAUNCHER, "" if how == "unset" else f"{machine} {starter.pid}")
    if how in ("gone", "elsewhere"):
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    launch.follow_launcher()
    assert sent.wait(5 if how == "gone" else 0.5) is (how == "gone")
    if how == "there":
        starter.send_signal(signal.SIGKILL)  # not waited for: a zombie has gone, too
        assert sent.wait(5)
    starter.kill()
    starter.wait()
    signal.signal(signal.SIGTERM, before)


def run_launcher(command):
    """The launcher's exit status, with the signals of this process passed on to it."""
    with LauncherSignals(local=True) as signals:
        return launch.run_launcher(command, dict(os.environ), signals)


def started(**flags):
    return plan_launch(LaunchFlags(**flags))


@pytest.mark.parametrize(
    ("visible", "options"),
    [
        (None, ["--num_gpus", "2"]),  # nvidia-smi's, without the parts of a GPU
        ("no driver", ["--num_gpus", "1"]),
        ("", ["--num_gpus", "1"]),
        (" ", ["--num_gpus", "1"]),
        ("-1", ["--num_gpus", "1"]),
        ("3", ["--num_gpus", "1"]),
        ("GPU-8f6d21", ["--num_gpus", "1"]),
        ("MIG-1", ["--num_gpus", "1"]),
        ("4,5,6,7", ["--include", "localhost:4,5,6,7"]),
        ("2, 3", ["--include", "localhost:2,3"]),
    ],
)
def test_gpus_are_found(visible, options, programs, monkeypatch):
    """The launcher replaces the variable, so that it is told; one process uses what the variable says."""
    if visible == "no driver":
        (programs / "nvidia-smi").write_text(NO_DRIVER)
    elif visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = started()
    assert found.options == [*options, *PORT]
    assert found.num_processes == (int(options[1]) if options[0] == "--num_gpus" else len(options[1].split(",")))
    assert found.needs_no_launcher == (found.num_processes == 1)


def test_some_of_the_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert started(num_gpus=2, master_port=29501).options == ["--include", "localhost:4,6", "--master_port", "29501"]
    with pytest.raises(UserError, match="--num_gpus 4 .* CUDA_VISIBLE_DEVICES=4,6,7 names fewer"):
        started(num_gpus=4)


@pytest.mark.parametrize("visible", ["GPU-1,GPU-2", "-1", "0,,1", "0,1,", "all", "0 1", "0;1", "0-3"])
def test_gpus_that_the_launcher_cannot_be_told(visible, monkeypatch):
    """It would drop them and take the machine's first ones, which may be somebody else's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match="takes only GPU numbers; .*such as CUDA_VISIBLE_DEVICES=0,1"):
        started(num_gpus=2)


@pytest.mark.parametrize("visible", ["GPU-1,GPU-2", "0-3", "all"])
def test_gpus_that_cannot_be_counted(visible, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match="takes only GPU numbers"):
        started()


@pytest.mark.parametrize("flags", [{}, {"num_gpus": 2}, {"num_nodes": 2, **HERE}])
def test_a_gpu_that_is_named_twice(flags, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES=0,0 names a GPU twice"):
        started(**flags)


@pytest.mark.parametrize("visible", ["4,5,6,7", "1", "0,2", "1,0", "08"])
def test_several_machines_use_their_first_gpus(visible, monkeypatch):
    """The launcher numbers them from 0 there, whatever the variable says."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 1")
    assert started(num_nodes=2, **HERE).hostfile_text == "node-0 slots=2\nnode-1 slots=2\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=f"CUDA_VISIBLE_DEVICES={visible}: on several machines the launcher uses the"):
        started(num_nodes=2, **HERE)


def test_machines_with_ssh(tmp_path):
    """Slots are counted; a number of processes takes their place."""
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\n\nfirst slots=8\nsecond slots=8  # the slow one")
    found = started(hostfile=str(hosts))
    assert (found.num_processes, found.options, found.ssh_hosts) == (
        16,
        ["--hostfile", str(hosts), *PORT],
        ("first", "second"),
    )
    found = started(hostfile=str(hosts), num_gpus=4)
    assert (found.num_processes, found.options) == (8, ["--hostfile", str(hosts), "--num_gpus", "4", *PORT])


def test_machines_without_ssh():
    found = started(num_nodes=2, num_gpus=8, node_rank=1, master_addr="10.0.0.1")
    options = ["--num_gpus", "8", *PORT, "--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1"]
    assert (found.num_processes, found.options, found.ssh_hosts) == (16, options, ())
    assert not found.needs_no_launcher and found.hostfile_text == "node-0 slots=8\nnode-1 slots=8\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"f\xfcrst slots=8\n", "is not in UTF-8: save the file in that encoding"),
        (b"# nobody\n", "names no machine"),
        (b"first slots=8\nsecond\n", 'the line of second must be like "second slots=8"'),
        (b"first 8\n", 'the line of first must be like "first slots=8"'),
        (b"first slots=8\nfirst slots=4\n", "names first twice"),
        (b"first slots=many\n", 'the line of first must be like "first slots=8"'),
        (b"first slots=0\n", 'the line of first must be like "first slots=8"'),
    ],
)
def test_a_bad_hostfile(content, message, tmp_path):
    hosts = tmp_path / "hosts"
    if content is not None:
        hosts.write_bytes(content)
    with pytest.raises(UserError, match=f"--hostfile {hosts}.*{message}"):
        started(hostfile=str(hosts))


def test_a_hostfile_that_is_a_folder(tmp_path):
    with pytest.raises(UserError, match="Is a directory"):
        started(hostfile=str(tmp_path))


@pytest.mark.parametrize(
    ("visible", "flags", "message"),
    [
        (None, {"node_rank": 2, "master_addr": "10.0.0.1"}, "--node_rank 2: the last of 2 machines"),
        (None, {"num_nodes": 3}, "--num_nodes 3 .*, but --hostfile .* names 2 machines"),
        ("0,1", {}, "slots=8.*, but CUDA_VISIBLE_DEVICES=0,1 names fewer"),
        ("0,1", {"num_gpus": 4}, "--num_gpus 4 .* CUDA_VISIBLE_DEVICES=0,1 names fewer"),
    ],
)
def test_a_hostfile_that_contradicts_other_settings(visible, flags, message, tmp_path, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=8\nsecond slots=8\n")
    with pytest.raises(UserError, match=message):
        started(hostfile=str(hosts), **flags)


def test_a_hostfile_with_other_settings_that_agree(tmp_path, monkeypatch):
    """Without ssh, the command runs on each machine of the list."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=8\nsecond slots=8\n")
    found = started(hostfile=str(hosts), num_nodes=2, node_rank=1, master_addr="10.0.0.1", num_gpus=2)
    without_ssh = ["--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1"]
    assert found.options == ["--hostfile", str(hosts), "--num_gpus", "2", *PORT, *without_ssh]
    assert (found.num_processes, found.hostfile_text, found.ssh_hosts) == (4, None, ())


def test_machines_of_a_hostfile_may_have_more_gpus_than_this_one(tmp_path, monkeypatch):
    """A scheduler sets the variable on each machine to the GPUs of that machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=2\nsecond slots=8\n")
    assert started(hostfile=str(hosts)).num_processes == 10


@pytest.mark.parametrize("port", [0, 65536])
def test_a_port_has_a_range(port):
    with pytest.raises(UserError, match=f"--master_port {port} is out of range: give a port from 1 to 65535"):
        started(master_port=port)


def test_more_processes_than_visible_gpus_on_several_machines(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="--num_gpus 4 .* CUDA_VISIBLE_DEVICES=0,1 names fewer"):
        started(num_nodes=2, num_gpus=4, **HERE)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_nodes": 2, "node_rank": 0}, "--master_addr"),
        ({"num_nodes": 2, "node_rank": 2, "master_addr": "10.0.0.1"}, "the last of 2 machines"),
        ({"num_nodes": 2, "master_addr": "10.0.0.1"}, "--node_rank"),
        (HERE, "--num_nodes .* is 1, but --node_rank is given: .*number of machines, or --hostfile"),
    ],
)
def test_what_several_machines_need(flags, message):
    with pytest.raises(UserError, match=message):
        started(**flags)


def test_a_process_of_a_launcher_knows_it(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not is_worker()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert is_worker()


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_processes_that_is_none(number):
    with pytest.raises(UserError, match=f"--num_gpus {number} is out of range"):
        started(num_gpus=number)


def test_what_a_process_of_a_launcher_reads(monkeypatch):
    """The launcher's variables are about its own machines; those of a preset are about the run."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("NUM_NODES", "2")
    monkeypatch.setenv("DATA", "rows.jsonl")
    known = worker_environment()
    assert known["DATA"] == "rows.jsonl" and not {"MASTER_ADDR", "NUM_NODES"} & {*known}


@pytest.mark.parametrize("content", ["A=1\nB=2\n", "A=1\n\n# ours\n B = 2"])
def test_variables_of_deepspeeds_own_file(content, tmp_path, monkeypatch):
    """However it ends, with comments and empty lines; a file by its whole path is read once."""
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "told"))
    (tmp_path / "told").write_text(content)
    assert launcher_variables() == {"A": "1", "B": "2"}
    for wrong in ("export", "=2"):
        (tmp_path / "told").write_text(f"A=1\n{wrong}\n")
        with pytest.raises(UserError, match="told:2: the line is not NAME=value"):
            launcher_variables()
    (tmp_path / "told").write_bytes(b"A=\xff")
    with pytest.raises(UserError, match="told is not in UTF-8"):
        launcher_variables()


@pytest.fixture
def waited_for(tmp_path, monkeypatch):
    """A file that is there once the launcher is waited for."""
    there = tmp_path / "waited_for"

    class Job(subprocess.Popen):
        def wait(self, timeout=None):
            there.touch()
            return super().wait(timeout)

    monkeypatch.setattr("dschat.launch.subprocess.Popen", Job)
    return there


def test_a_signal_that_comes_while_the_launcher_starts():
    """Goes to it, not to this process alone."""
    command = ["sh", "-c", f"kill -TERM {os.getpid()}; sleep 60"]
    assert run_launcher(command) == 143


@pytest.mark.parametrize("how", ["", "trap '' TERM; "])
def test_what_the_launcher_leaves_behind_is_ended(how, monkeypatch, capsys):
    """At SIGTERM, or by SIGKILL where it takes no notice; the launcher's status counts."""
    monkeypatch.setattr("dschat.launch.STRAYS_TERM_AFTER", 0.3)
    monkeypatch.setattr("dschat.launch.STRAYS_KILL_AFTER", 0.5)
    begun = time.monotonic()
    stray = f"{how}while :; do sleep 0.1; done"
    assert run_launcher(["sh", "-c", f'sh -c "{stray}" & exit 7']) == 7
    assert time.monotonic() - begun < 20
    told = capsys.readouterr().err
    assert "the launcher has ended, but not its processes" in told and "they get SIGTERM" in told
    assert ("they get SIGKILL" in told) == bool(how)


class ClosedTerminal:
    """A stream of which nobody reads."""

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


def test_what_the_launcher_leaves_behind_is_ended_behind_a_closed_terminal(monkeypatch):
    """The warning cannot be written; the process is signalled all the same."""
    monkeypatch.setattr("dschat.launch.STRAYS_TERM_AFTER", 0.3)
    monkeypatch.setattr("sys.stderr", ClosedTerminal())
    begun = time.monotonic()
    assert run_launcher(["sh", "-c", 'sh -c "sleep 60" & exit 7']) == 7
    assert time.monotonic() - begun < 20


def test_a_closed_terminal_is_told_to_the_launcher_as_sigterm():
    """DeepSpeed's launcher handles SIGTERM and SIGINT alone; the status is that of the signal which came."""
    command = ["sh", "-c", f"trap 'exit 9' HUP; trap 'exit 8' TERM; kill -HUP {os.getpid()}; sleep 60 & wait"]
    with LauncherSignals(local=False) as signals:
        launcher = subprocess.Popen(command, process_group=0)
        signals.pass_to(launcher.pid)
        assert launcher.wait(30) == 8 and signals.last == signal.SIGHUP


def test_what_the_launcher_leaves_behind_may_end_by_itself(capsys):
    command = ["sh", "-c", "sleep 0.5 & exit 0"]
    assert run_launcher(command) == 0 and not capsys.readouterr().err


def test_a_process_that_ends_before_the_signal_comes(waited_for, monkeypatch):
    """Is nothing to fail of."""

    class Ended:
        def send_signal(self, number):
            asked.append(number)
            raise psutil.NoSuchProcess(1)

    asked = []
    monkeypatch.setattr("dschat.launch._training_processes", lambda launcher: [Ended()])
    command = ["sh", "-c", f"until [ -e {waited_for} ]; do sleep 0.05; done; kill -INT {os.getpid()}"]
    assert run_launcher(command) == 130 and asked == [signal.SIGINT]


def test_a_port_on_which_another_run_listens_is_refused_before_processes_start(monkeypatch):
    """Else a process of this run may join the other one before this run's first process finds the port in use."""
    monkeypatch.setattr(launch, "run_launcher", None)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"--master_port {port} .*another run or program listens there"):
            launch.launch(started(num_gpus=2, master_port=port), ["ppo"])
        launch_without_processes(started(num_gpus=2, num_nodes=2, node_rank=1, master_addr="first", master_port=port))
    launch_without_processes(started(num_gpus=2, master_port=port))


def launch_without_processes(plan):
    with pytest.raises(TypeError, match="not callable"):  # the launcher of these tests is None
        launch.launch(plan, ["ppo"])


def test_where_the_first_process_listens(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("first slots=2\n")
    assert started(num_gpus=2, master_port=7).local_port == 7
    assert started(hostfile=str(hosts), master_port=7).local_port == 7
    nodes = {"num_gpus": 2, "num_nodes": 2, "master_addr": "first", "master_port": 7}
    assert started(node_rank=0, **nodes).local_port == 7
    assert started(node_rank=1, **nodes).local_port is None
    hosts.write_text("first slots=2\nsecond slots=2\n")
    assert started(hostfile=str(hosts), master_port=7).local_port is None  # the first machine may be another


def test_the_latest_signal_is_kept_until_the_launcher_runs():
    command = ["sh", "-c", "trap 'exit 8' TERM; trap 'exit 7' INT; echo ready; sleep 60 & wait"]
    with LauncherSignals(local=True) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        launcher = subprocess.Popen(command, process_group=0, stdout=subprocess.PIPE)
        assert launcher.stdout.readline() == b"ready\n"
        signals.pass_to(launcher.pid)
        assert launcher.wait(30) == 7 and signals.last == signal.SIGINT
