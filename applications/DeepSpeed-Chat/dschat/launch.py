# SPDX-License-Identifier: Apache-2.0
"""Decides which training processes `dschat ppo` starts on this machine, one per GPU, and starts them.

`dschat ppo` (dschat/cli.py) makes a `LaunchPlan` from its flags and from what a cluster says (dschat/cluster.py), and
hands it to `launch`, which runs `python -m dschat ppo …` once per rank (dschat/ranks.py) and waits. Several machines
work without ssh, where the command runs on each machine: started by the cluster, or by hand with --num_nodes,
--node_rank and --master_addr. With --hostfile the command runs on one machine, and DeepSpeed's launcher reaches the
others by ssh (dschat/remote.py).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from dschat.base.errors import UserError
from dschat.cluster import LOCALHOST, ClusterNode, Rank, check_alone
from dschat.settings.flags import check_values, default_of, flags_of
from dschat.settings.processes import LaunchFlags

# Environment variables of ranks.
FOLLOWS_LAUNCHER = "MA_RLHF_FOLLOWS_LAUNCHER"  # set if standard input ends with the process that called `launch`
ERROR_FILE = "MA_RLHF_ERROR_FILE"  # file in which the first rank that fails leaves its message
GIVEN_VARIABLE = "MA_RLHF_GIVEN"  # JSON with the user's words and the values of the flags, which ranks train with
NO_GPU = re.compile(r"\s*(-1)?\s*")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs
GPU = re.compile(r"[0-9]+|(GPU|MIG)-\S+")  # an entry of CUDA_VISIBLE_DEVICES: a number, or an identifier
LAUNCH_ONLY_FLAGS = ("hostfile", "num_nodes", "node_rank", "master_addr", "master_port", "log_dir")  # not for ranks


@dataclass(frozen=True)
class LaunchPlan:
    """The ranks to start.

    Attributes:
        world_size: processes of the run, on all machines together.
        local_size: those on this machine.
        first_rank: number of the first one on this machine.
        master_addr: address of the machine of rank 0.
        master_port: port on which rank 0 listens.
        ssh_hosts: machines on which DeepSpeed's launcher starts all ranks by ssh; empty: they are started here.
        ssh_options: options of that launcher.
    """

    world_size: int
    local_size: int
    first_rank: int = 0
    master_addr: str = LOCALHOST
    master_port: int = 29500
    ssh_hosts: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()


# -- ranks


def worker_environment() -> dict[str, str]:
    """Environment variables from which a rank reads its flags.

    Those of `LaunchFlags` are left out. MASTER_ADDR, for instance, is set by the launcher, not by the user.
    """
    launch_variables = {flag.environment for flag in flags_of(LaunchFlags).values()}
    variables: dict[str, str] = {}
    for name, value in os.environ.items():
        if name not in launch_variables:
            variables[name] = value
    return variables


def follow_launcher() -> None:
    """Sends this rank SIGTERM when the process that called `launch` ends, so that it saves a checkpoint and stops.

    Otherwise a launcher that is killed by SIGKILL would leave ranks that keep their GPUs and their port. Ranks that
    were started by ssh do not watch the launcher.
    """
    if os.environ.pop(FOLLOWS_LAUNCHER, ""):
        Thread(target=_stop_at_end_of_input, daemon=True).start()


def _stop_at_end_of_input() -> None:
    """Waits for the end of standard input, which the launcher holds open, then sends SIGTERM to this process."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


# -- the plan


def plan_launch(flags: LaunchFlags, machine: ClusterNode | None) -> LaunchPlan:
    """Decides which ranks to start.

    Args:
        flags: the flags.
        machine: what a cluster says of this process (`process_of`), unless that is a rank.

    Raises:
        UserError: a flag is out of range, the hostfile cannot be used, or flags, hostfile, CUDA_VISIBLE_DEVICES and
            what the cluster says contradict each other.
    """
    check_values(flags)
    if machine is not None:
        allowed: dict[str, tuple[int | None, ...]] = {
            "hostfile": (None,),
            "num_nodes": (None, machine.count),
            "node_rank": (None, machine.number),
        }
        does = f"starts this command on {machine.count} machines, of which this is number {machine.number}"
        _refuse_others(flags, allowed, machine.source, does)
        return _plan_machine(flags, machine)
    if flags.hostfile:
        return _plan_hostfile(flags, flags.hostfile)
    is_alone = flags.num_nodes == 1 and flags.node_rank == 0
    if not is_alone and (flags.node_rank is not None or (flags.num_nodes or 1) > 1):
        return _plan_machine(flags, _machine_of_flags(flags))
    if flags.num_nodes is None:
        check_alone(os.environ)
    count = _count_ranks(flags)
    return LaunchPlan(count, count, master_port=_port_here(flags))


def _port_here(flags: LaunchFlags) -> int:
    """The port of a run on this machine alone: the one that --master_port gives, or else any that is free."""
    if flags.master_port != default_of(LaunchFlags, "master_port"):
        return flags.master_port
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def check_against_rank(flags: LaunchFlags, rank: Rank) -> None:
    """Raises UserError if flags ask a process that a cluster has started as one rank to start others."""
    allowed: dict[str, tuple[int | None, ...]] = {
        "log_dir": (None,),
        "hostfile": (None,),
        "node_rank": (None,),
        "num_nodes": (None, 1),
        "num_gpus": (None, 1, rank.local_size),
    }
    does = f"starts every rank itself, {rank.local_size} on this machine, and gets its output"
    _refuse_others(flags, allowed, rank.source, does)


def _refuse_others(flags: LaunchFlags, allowed: Mapping[str, Sequence[int | None]], source: str, does: str) -> None:
    """Raises UserError for the first flag whose value is not among those that are allowed beside a cluster."""
    for name, values in allowed.items():
        value = getattr(flags, name)
        if value not in values:
            variable = flags_of(LaunchFlags)[name].environment
            shown = f"--{name} {value} ({variable})" if variable else f"--{name} {value}"
            raise UserError(f"{shown}, but {source} {does}: leave it out, or start `dschat` another way.")


def _machine_of_flags(flags: LaunchFlags) -> ClusterNode:
    """One of several machines, by the flags. Raises UserError if they contradict each other."""
    if flags.node_rank is None:
        raise UserError("--node_rank (NODE_RANK) is missing: give 0 on the first machine, 1 on the second, …")
    count = flags.num_nodes or 1
    if flags.node_rank >= count or count == 1:
        raise UserError(
            f"--node_rank {flags.node_rank} with --num_nodes {count} (NUM_NODES): give the number of machines;"
            f" the last one has number {count - 1}."
        )
    return ClusterNode(flags.node_rank, count, None, None, None, f"--num_nodes {count}")


def _plan_machine(flags: LaunchFlags, machine: ClusterNode) -> LaunchPlan:
    """The plan for one of several machines, on each of which this command runs."""
    address = flags.master_addr or machine.master_addr
    if address is None:
        raise UserError(f"{machine.source}: give the address of the first machine, --master_addr (MASTER_ADDR).")
    count = _count_ranks(flags, machine.processes)
    port = flags.master_port
    if flags.master_addr is None and port == default_of(LaunchFlags, "master_port"):
        port = machine.master_port or port
    return LaunchPlan(count * machine.count, count, machine.number * count, address, port)


def _plan_hostfile(flags: LaunchFlags, hostfile: str) -> LaunchPlan:
    """The plan for the machines of a hostfile, with ssh unless there is one machine."""
    from dschat.remote import read_hostfile

    slots_of = read_hostfile(hostfile)
    if flags.num_nodes not in (None, 1, len(slots_of)) or flags.node_rank is not None:
        raise UserError(
            f"--hostfile {hostfile} names {len(slots_of)} machines, which are started from this one: leave --num_nodes"
            " (NUM_NODES) and --node_rank (NODE_RANK) out."
        )
    slots = [flags.num_gpus or count for count in slots_of.values()]
    source = f"--num_gpus {flags.num_gpus} (NUM_GPUS)" if flags.num_gpus else f"--hostfile {hostfile}"
    _check_visible(min(slots), source)  # this machine has at least so many
    if len(slots) == 1:
        return LaunchPlan(slots[0], slots[0], master_port=_port_here(flags))
    if flags.log_dir:
        raise UserError(f"--log_dir {flags.log_dir} does not reach the machines of --hostfile: leave one of them out.")
    visible = _visible_gpus()
    if visible != [str(number) for number in range(len(visible))]:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}: over ssh DeepSpeed's launcher uses the GPUs"
            " from number 0 on; unset the variable, and set --num_gpus to the GPUs to use per machine."
        )
    options = ["--hostfile", hostfile, "--master_port", str(flags.master_port)]
    if flags.master_addr is not None:
        options += ["--master_addr", flags.master_addr]
    if flags.num_gpus is not None:
        options += ["--num_gpus", str(flags.num_gpus)]
    return LaunchPlan(
        world_size=sum(slots),
        local_size=slots[0],
        master_port=flags.master_port,
        ssh_hosts=tuple(slots_of),
        ssh_options=tuple(options),
    )


def _count_ranks(flags: LaunchFlags, of_cluster: int | None = None) -> int:
    """Ranks of this machine: --num_gpus if CUDA_VISIBLE_DEVICES allows it, the cluster's number, or one per GPU."""
    if flags.num_gpus is None:
        return of_cluster or _count_gpus()
    _check_visible(flags.num_gpus, f"--num_gpus {flags.num_gpus} (NUM_GPUS)")
    return flags.num_gpus


def _check_visible(count: int, source: str) -> None:
    """Raises UserError if CUDA_VISIBLE_DEVICES names GPUs, but fewer than `count`, the number from `source`."""
    visible = _visible_gpus()
    if visible and count > len(visible):
        raise UserError(
            f"{source}: {count} ranks, but CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} names fewer GPUs:"
            " change one of them."
        )


def _visible_gpus() -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES; empty if the variable is not set or hides all.

    Raises:
        UserError: an entry is neither a number nor an identifier, or occurs twice. CUDA would then see fewer GPUs.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if NO_GPU.fullmatch(variable):
        return []
    entries = [entry.strip() for entry in variable.split(",")]
    for entry in entries:
        if not GPU.fullmatch(entry):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={variable}: {entry!r} is no GPU; give the numbers or identifiers that"
                " `nvidia-smi --list-gpus` shows, such as CUDA_VISIBLE_DEVICES=0,1."
            )
    different = {int(entry) if entry.isdecimal() else entry for entry in entries}
    if len(different) < len(entries):
        raise UserError(f"CUDA_VISIBLE_DEVICES={variable} names a GPU twice: name each once.")
    return entries


def _count_gpus() -> int:
    """GPUs of this machine that may be used; 1 if there are none or CUDA_VISIBLE_DEVICES hides them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(_visible_gpus()) or 1
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    except OSError:
        return 1
    return sum(line.startswith("GPU ") for line in listing.splitlines()) or 1


# -- the launch


def launch(plan: LaunchPlan, arguments: Sequence[str], log_dir: str | None = None, given: str = "") -> int:
    """Runs `python -m dschat …` in every rank of the plan, and waits for all of them.

    At the end the message of the rank that failed first is repeated below the others' output.

    Args:
        plan: the ranks.
        arguments: the words of the subcommand.
        log_dir: folder for the output of each rank of this machine, besides the terminal.
        given: `GIVEN_VARIABLE` of the ranks.

    Returns:
        The exit status, see `run_ranks`.

    Raises:
        UserError: the folder cannot be made; the port of the plan cannot be used; another machine cannot be reached,
            or a program that reaches it is not installed.
    """
    if plan.first_rank == 0 and not plan.ssh_hosts:  # rank 0 is surely on this machine
        _check_port(plan.master_port)
    log_folder = _make_folder(log_dir) if log_dir else None
    with tempfile.TemporaryDirectory() as folder:
        error_file = Path(folder) / "error"
        error_file.touch()
        environment = dict(os.environ)
        environment[ERROR_FILE] = str(error_file)
        environment[GIVEN_VARIABLE] = given
        if plan.ssh_hosts:
            from dschat.remote import run_by_ssh

            status = run_by_ssh(plan.ssh_options, plan.ssh_hosts, arguments, environment, Path(folder))
        else:
            from dschat.ranks import passing_on_signals, run_ranks

            environment[FOLLOWS_LAUNCHER] = "1"
            environments = [environment | variables for variables in variables_of_ranks(plan)]
            command = [sys.executable, "-m", "dschat", *arguments]
            with passing_on_signals() as signals:
                status = run_ranks(command, environments, signals, plan.first_rank, log_folder)
        with suppress(OSError):  # the terminal may be closed
            sys.stderr.write(error_file.read_text(encoding="utf-8"))
    return status


def _make_folder(log_dir: str) -> Path:
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--log_dir {log_dir} cannot be made: {error.strerror}. Give another folder.") from error
    return Path(log_dir)


def variables_of_ranks(plan: LaunchPlan) -> list[dict[str, str]]:
    """The variables of each rank of this machine that differ from this process's."""
    variables = []
    for local_rank in range(plan.local_size):
        rank = plan.first_rank + local_rank
        process = Rank(rank, local_rank, plan.world_size, plan.local_size, plan.master_addr, "dschat")
        variables.append(process.variables(plan.master_addr, plan.master_port))
    return variables


def _check_port(port: int) -> None:
    """Refuses a port on which something listens already: if that is another run, processes of this one would join it.

    Raises:
        UserError: the port cannot be used.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a run that has ended do not count
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"--master_port {port} (MASTER_PORT): {error.strerror}. Give every run on a machine a port of its own."
            ) from error
