# SPDX-License-Identifier: Apache-2.0
"""Starts one training process per GPU through DeepSpeed's launcher, on this machine or on several.

`dschat ppo` (dschat/cli.py) makes a `LaunchPlan` from its flags and hands it to `launch`, which runs `python -m dschat
ppo …` in every process and waits. Several machines work either with ssh between them, where --hostfile is DeepSpeed's
list of machines (lines of "name slots=8") and the command runs on one machine; or without, where the command runs on
each machine with --num_nodes, --node_rank and --master_addr.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import FrameType, TracebackType

import psutil

from dschat.base.errors import UserError
from dschat.base.signals import signals_that_stop
from dschat.remote import REMOTE_FILE_VARIABLE, check_paths, check_programs, pack, remote_file, split_variables
from dschat.settings.flags import check_values, flags_of
from dschat.settings.processes import LaunchFlags

WORKER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # set by every launcher
# Environment variables of the launcher and of workers.
LAUNCHER = "MA_RLHF_LAUNCHER"  # host name and process id of the process that called `launch`
ERROR_FILE = "MA_RLHF_ERROR_FILE"  # file in which the first worker that fails leaves its message
DS_ENV_FILE = "DS_ENV_FILE"  # name of DeepSpeed's file of variables for other machines
# Values of CUDA_VISIBLE_DEVICES.
GPU_NUMBERS = re.compile(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*")  # such as 0,1
ONE_GPU_OR_NONE = re.compile(r"\s*((GPU|MIG)-[^,\s]+|-1)?\s*")  # an identifier, -1 or nothing
HOSTFILE_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[0-9]+)(\s.*)?")  # what DeepSpeed's launcher accepts
LAUNCH_ONLY_FLAGS = ("hostfile", "node_rank", "master_addr", "master_port")  # not passed on to workers
LAUNCHER_CHECK_INTERVAL = 1.0  # seconds between two checks that the launching process still runs
# Processes that outlive the launcher ("strays") are ended.
STRAYS_TERM_AFTER = 60.0  # seconds from the launcher's end to SIGTERM
STRAYS_KILL_AFTER = 300.0  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class LaunchPlan:
    """Processes to start, and the options of DeepSpeed's launcher that start them.

    Attributes:
        num_processes: number of processes on all machines together.
        options: command-line options of the launcher.
        needs_no_launcher: the run has a single process on this machine, so the calling process can train.
        hostfile_text: content of a hostfile to write for the launcher; None if it needs none or has the user's.
        ssh_hosts: machines on which the launcher starts processes by ssh.
        local_port: port on which the first process of the run will listen, if that process is on this machine.
    """

    num_processes: int
    options: list[str]
    needs_no_launcher: bool = False
    hostfile_text: str | None = None
    ssh_hosts: tuple[str, ...] = ()
    local_port: int | None = None


# -- workers: the processes that a launcher has started


def is_worker() -> bool:
    """Whether a launcher has started this process."""
    return all(name in os.environ for name in WORKER_VARIABLES)


def worker_environment() -> dict[str, str]:
    """Environment variables from which a worker reads its flags.

    Those of `LaunchFlags` are left out. MASTER_ADDR, for instance, is set by the launcher, not by the user.
    """
    launch_variables = {flag.environment for flag in flags_of(LaunchFlags).values()}
    variables: dict[str, str] = {}
    for name, value in os.environ.items():
        if name not in launch_variables:
            variables[name] = value
    return variables


def follow_launcher() -> None:
    """Sends this worker SIGTERM when the process that called `launch` ends, so that it saves a checkpoint and stops.

    Otherwise a launcher that is killed by SIGKILL would leave workers that keep their GPUs and their port. Workers on
    other machines and workers that were started by ssh do not watch the launcher.
    """
    machine, _, process_id = os.environ.get(LAUNCHER, "").rpartition(" ")
    if machine == socket.gethostname():
        Thread(target=_stop_after, args=(int(process_id),), daemon=True).start()


def _stop_after(launcher: int) -> None:
    """Waits for the end of the launching process, then sends SIGTERM to this one."""
    while _is_running(launcher):
        time.sleep(LAUNCHER_CHECK_INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_running(process_id: int) -> bool:
    """Whether a process with this id runs; zombies do not count.

    A later process with the same id would count, too. Start times would not tell them apart if the clock has been set.
    """
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- the plan


def plan_launch(flags: LaunchFlags) -> LaunchPlan:
    """Decides which processes to start.

    Raises:
        UserError: a flag is out of range, the hostfile cannot be used, or flags, hostfile and CUDA_VISIBLE_DEVICES
            contradict each other.
    """
    check_values(flags)
    if flags.hostfile:
        return _plan_hostfile(flags, flags.hostfile)
    if flags.node_rank is not None or flags.num_nodes > 1:
        return _plan_nodes(flags)
    return _plan_this_machine(flags)


def _plan_this_machine(flags: LaunchFlags) -> LaunchPlan:
    """The plan for this machine alone."""
    port_options = ["--master_port", str(flags.master_port)]
    count = flags.num_gpus or _count_gpus()
    if count == 1:
        return LaunchPlan(1, ["--num_gpus", "1", *port_options], needs_no_launcher=True)
    visible = _visible_gpus()
    if not visible:
        return LaunchPlan(count, ["--num_gpus", str(count), *port_options], local_port=flags.master_port)
    _check_visible(count, f"--num_gpus {count} (NUM_GPUS)", visible)
    # The launcher replaces CUDA_VISIBLE_DEVICES, so it gets the GPUs as an option.
    gpu_numbers = ",".join(visible[:count])
    options = ["--include", f"localhost:{gpu_numbers}", *port_options]
    return LaunchPlan(count, options, local_port=flags.master_port)


def _plan_hostfile(flags: LaunchFlags, hostfile: str) -> LaunchPlan:
    """The plan for the machines of a hostfile, with ssh unless --node_rank is given."""
    options = ["--hostfile", hostfile, *_options_of_machines(flags)]
    slots_of = _read_hostfile(hostfile)
    if flags.num_nodes not in (1, len(slots_of)):
        raise UserError(
            f"--num_nodes {flags.num_nodes} (NUM_NODES), but --hostfile {hostfile} names {len(slots_of)} machines:"
            " leave --num_nodes out."
        )
    if flags.num_gpus is None:
        fewest_slots = min(slots_of.values())  # this machine has at least so many
        _check_visible(fewest_slots, f"--hostfile {hostfile}: slots={fewest_slots}", _visible_gpus())
    count = sum(flags.num_gpus or slots for slots in slots_of.values())
    if flags.node_rank is not None:
        options += _options_without_ssh(flags, len(slots_of))
        return LaunchPlan(count, options, local_port=_port_of_first_machine(flags))
    # DeepSpeed's launcher starts the processes of a single machine by itself, without ssh.
    if len(slots_of) == 1:
        return LaunchPlan(count, options, local_port=flags.master_port)
    return LaunchPlan(count, options, ssh_hosts=tuple(slots_of))


def _plan_nodes(flags: LaunchFlags) -> LaunchPlan:
    """The plan for several machines without ssh or hostfile."""
    options = _options_of_machines(flags)
    if flags.node_rank is None:
        raise UserError("--node_rank (NODE_RANK) is missing: give 0 on the first machine, 1 on the second, …")
    if flags.num_nodes == 1:
        raise UserError(
            "--num_nodes (NUM_NODES) is 1, but --node_rank is given: give the number of machines, or --hostfile."
        )
    options += _options_without_ssh(flags, flags.num_nodes)
    slots = flags.num_gpus or _count_gpus()
    hostfile_text = "".join(f"node-{node} slots={slots}\n" for node in range(flags.num_nodes))
    return LaunchPlan(
        slots * flags.num_nodes,
        options,
        hostfile_text=hostfile_text,
        local_port=_port_of_first_machine(flags),
    )


def _port_of_first_machine(flags: LaunchFlags) -> int | None:
    """The port of --master_port on the first machine, where a process listens; None on the others."""
    return flags.master_port if flags.node_rank == 0 else None


def _options_of_machines(flags: LaunchFlags) -> list[str]:
    """Options of the launcher for several machines, or for a hostfile of one."""
    visible = _visible_gpus()
    if visible != [str(number) for number in range(len(visible))]:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}: on several machines the launcher uses the"
            " GPUs from number 0 on; unset the variable, and set --num_gpus to the GPUs to use per machine."
        )
    port_options = ["--master_port", str(flags.master_port)]
    if flags.num_gpus is None:
        return port_options
    _check_visible(flags.num_gpus, f"--num_gpus {flags.num_gpus} (NUM_GPUS)", visible)
    return ["--num_gpus", str(flags.num_gpus), *port_options]


def _options_without_ssh(flags: LaunchFlags, num_machines: int) -> list[str]:
    """Options of the launcher that starts the processes of this machine alone, one of several."""
    assert flags.node_rank is not None
    if flags.node_rank >= num_machines:
        raise UserError(
            f"--node_rank {flags.node_rank}: the last of {num_machines} machines (--num_nodes or --hostfile) is number"
            f" {num_machines - 1}."
        )
    if flags.master_addr is None:
        raise UserError("--master_addr (MASTER_ADDR) is missing: give the address of the first machine.")
    return ["--no_ssh", "--node_rank", str(flags.node_rank), "--master_addr", flags.master_addr]


def _check_visible(count: int, source: str, visible: Sequence[str]) -> None:
    """Raises UserError if CUDA_VISIBLE_DEVICES names GPUs, but fewer than `count`, the number from `source`."""
    if visible and count > len(visible):
        raise UserError(
            f"{source}, but CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} names fewer: change one of them."
        )


def _read_hostfile(hostfile: str) -> dict[str, int]:
    """Slots of each machine in a hostfile of lines "name slots=8".

    Raises:
        UserError: the file cannot be read, or holds a line that DeepSpeed's launcher would refuse.
    """
    slots_of: dict[str, int] = {}
    for line in _read_lines(hostfile, f"--hostfile {hostfile}"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = HOSTFILE_LINE.fullmatch(line)
        if match is None or int(match["slots"]) < 1:
            host = line.split()[0]
            raise UserError(f'--hostfile {hostfile}: the line of {host} must be like "{host} slots=8".')
        host = match["host"]
        if host in slots_of:
            raise UserError(f"--hostfile {hostfile} names {host} twice: give each machine one line.")
        slots_of[host] = int(match["slots"])
    if not slots_of:
        raise UserError(f'--hostfile {hostfile} names no machine: give lines like "name slots=8".')
    return slots_of


def _read_lines(file: str | Path, source: str) -> list[str]:
    """The lines of a file. Raises UserError, which begins with `source`, if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not in UTF-8: save the file in that encoding.") from error
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error}.") from error


def _visible_gpus() -> list[str]:
    """GPU numbers in CUDA_VISIBLE_DEVICES; empty if the variable is empty or not set.

    Raises:
        UserError: an entry is not a number, or occurs twice. The launcher would count such entries and use that many
            GPUs from number 0 on, which may be in use by others.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not variable.strip():
        return []
    if not GPU_NUMBERS.fullmatch(variable):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={variable}: the launcher takes only GPU numbers; give the numbers that"
            " `nvidia-smi --list-gpus` shows, such as CUDA_VISIBLE_DEVICES=0,1."
        )
    numbers = [number.strip() for number in variable.split(",")]
    if len({int(number) for number in numbers}) < len(numbers):
        raise UserError(f"CUDA_VISIBLE_DEVICES={variable} names a GPU twice: name each once.")
    return numbers


def _count_gpus() -> int:
    """GPUs of this machine that may be used; 1 if there are none or CUDA_VISIBLE_DEVICES hides them."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        # One process needs no launcher, so the variable may hold what the launcher does not take.
        return 1 if ONE_GPU_OR_NONE.fullmatch(variable) else len(_visible_gpus())
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    except OSError:
        return 1
    return sum(line.startswith("GPU ") for line in listing.splitlines()) or 1


# -- the launch


def launch(plan: LaunchPlan, arguments: Sequence[str]) -> int:
    """Runs `python -m dschat …` in every process of the plan, and waits for all of them.

    The first of the signals that stop a run is passed on to the training processes, which save a checkpoint, however
    long that takes, and end; the launcher ends after them. A second signal goes to the launcher, which kills them.
    Processes that outlive the launcher get SIGTERM after a minute, and SIGKILL five minutes later. At the end the
    message of the worker that failed first is repeated below the launcher's own output.

    Args:
        plan: the processes.
        arguments: the subcommand and its flags.

    Returns:
        The launcher's exit status; 128 + its number after a signal: 143 after SIGTERM, 130 after Ctrl-C.

    Raises:
        UserError: another machine cannot be reached, or a program that reaches it is not installed; or the port of
            the plan cannot be used.
    """
    if plan.local_port is not None:
        _check_port(plan.local_port)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        error_file = scratch / "error"
        error_file.touch()
        environment = dict(os.environ)
        environment[ERROR_FILE] = str(error_file)
        environment[LAUNCHER] = f"{socket.gethostname()} {os.getpid()}"

        # Started as a module, because a `deepspeed` on the PATH may belong to another Python.
        command = [sys.executable, "-m", "deepspeed.launcher.runner"]
        if plan.hostfile_text is not None:
            hostfile = scratch / "hostfile"
            hostfile.write_text(plan.hostfile_text, encoding="utf-8")
            command += ["--hostfile", str(hostfile)]
        command += [*plan.options, "--module", "--no_local_rank", "dschat"]

        if plan.ssh_hosts:
            status = _run_by_ssh([*command, *pack(arguments)], environment, plan.ssh_hosts, scratch)
        else:
            with LauncherSignals(local=True) as signals:
                status = run_launcher([*command, *arguments], environment, signals)
        with suppress(OSError):  # the terminal may be closed
            sys.stderr.write(error_file.read_text(encoding="utf-8"))
    return status


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
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"--master_port {port} (MASTER_PORT): {error.strerror}. Give another port.") from error
            raise UserError(
                f"--master_port {port} (MASTER_PORT): another run or program listens there. Give every run on a"
                " machine a port of its own."
            ) from error


def _run_by_ssh(
    command: Sequence[str],
    environment: Mapping[str, str],
    hosts: Sequence[str],
    scratch: Path,
) -> int:
    """Runs the launcher for several machines that it reaches by ssh.

    Args:
        command: the launcher's command line.
        environment: variables for the training processes.
        hosts: names of the machines.
        scratch: folder for the launcher's file of variables.

    Returns:
        The exit status.
    """
    check_paths()
    check_programs()
    variables = split_variables(environment, _launcher_variables())
    with LauncherSignals(local=False) as signals, remote_file(variables.delivered, hosts) as path:
        if signals.last is not None:  # a signal came while the variables were sent
            return 128 + signals.last
        exported = variables.exported | {REMOTE_FILE_VARIABLE: path}
        lines = [f"{name}={value}\n" for name, value in exported.items()]
        ds_env_file = scratch / "variables"
        ds_env_file.write_text("".join(lines), encoding="utf-8")
        # Processes that the launcher starts on this machine read its environment instead of DeepSpeed's file.
        launcher_environment = variables.launcher | {DS_ENV_FILE: str(ds_env_file), REMOTE_FILE_VARIABLE: path}
        return run_launcher(command, launcher_environment, signals)


def run_launcher(
    command: Sequence[str],
    environment: Mapping[str, str],
    signals: LauncherSignals,
) -> int:
    """Runs the launcher in a new process group until it and its processes have ended. Returns the exit status."""
    launcher = subprocess.Popen(command, env=environment, process_group=0)
    signals.pass_to(launcher.pid)
    status = launcher.wait()
    _end_strays(launcher.pid)
    signals.pass_to(None)
    if signals.last is not None:
        return 128 + signals.last
    return status if status >= 0 else 128 - status  # 128 + n if signal n has ended the launcher


def _launcher_variables() -> dict[str, str]:
    """Variables for other machines from DeepSpeed's .deepspeed_env; the current folder's file overrides the home's.

    Raises:
        UserError: a file cannot be read, or a line is not NAME=value.
    """
    relative_path = Path(os.environ.get(DS_ENV_FILE, ".deepspeed_env"))
    paths = dict.fromkeys([Path.home() / relative_path, Path.cwd() / relative_path])  # an absolute path once
    variables: dict[str, str] = {}
    for path in paths:
        lines = _read_lines(path, str(path)) if path.is_file() else []
        for number, line in enumerate(lines, start=1):
            name, equals, value = line.strip().partition("=")
            if not line.strip() or name.startswith("#"):
                continue
            if not equals or not name.strip():
                raise UserError(f"{path}:{number}: the line is not NAME=value; correct it, or begin it with #.")
            variables[name.strip()] = value.strip()
    return variables


# -- signals and processes of the launcher


class LauncherSignals:
    """Context in which signals that stop a run do not end this process but are passed on to the launcher's processes.

    A signal that comes before the launcher runs is passed on as soon as it does.

    Attributes:
        last: the latest signal; None before the first.
    """

    def __init__(self, local: bool) -> None:
        """Prepares the handlers.

        Args:
            local: the training processes run on this machine.
        """
        self.last: signal.Signals | None = None
        self._local = local
        self._launcher_group: int | None = None
        self._earlier_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> LauncherSignals:
        """Installs the handlers."""
        for signal_number in signals_that_stop():
            self._earlier_handlers[signal_number] = signal.signal(signal_number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restores the earlier handlers."""
        for signal_number, handler in self._earlier_handlers.items():
            signal.signal(signal_number, handler)  # type: ignore[arg-type]

    def pass_to(self, group: int | None) -> None:
        """Sets the process group that gets signals, or None; a signal that has already come is passed on at once."""
        self._launcher_group = group
        if group is not None and self.last is not None:
            _signal_launcher(group, self.last)

    def _handle(
        self,
        signal_number: int,
        frame: FrameType | None,
    ) -> None:
        """Passes a signal on: the first one to the training processes, a later one to the launcher."""
        is_first = self.last is None
        self.last = signal.Signals(signal_number)
        if self._launcher_group is None:
            return
        training = _training_processes(self._launcher_group) if is_first and self._local else []
        for process in training:
            with suppress(psutil.Error):  # it has just ended
                process.send_signal(signal_number)
        if not training:
            _signal_launcher(self._launcher_group, signal_number)


def _signal_launcher(group: int, signal_number: int) -> None:
    """Sends a signal to DeepSpeed's launcher, which ends its processes at SIGTERM and Ctrl-C, but not at SIGHUP."""
    _signal_group(group, signal.SIGTERM if signal_number == signal.SIGHUP else signal_number)


def _training_processes(launcher: int) -> list[psutil.Process]:
    """The training processes on this machine: children of the launcher's children. Empty before they have started."""
    training: list[psutil.Process] = []
    try:
        for child in psutil.Process(launcher).children():
            training += child.children()
    except psutil.Error:
        return []
    return training


def _end_strays(group: int) -> None:
    """Waits for processes that have outlived the launcher of their group, and ends those that do not end themselves.

    A training process whose launcher was killed, or a worker that no signal has reached, would otherwise keep its GPU
    and its port.
    """
    for patience, signal_number in ((STRAYS_TERM_AFTER, signal.SIGTERM), (STRAYS_KILL_AFTER, signal.SIGKILL)):
        strays = _wait_for_group(group, patience)
        if not strays:
            return
        process_ids = ", ".join(str(process.pid) for process in strays)
        warning = f"the launcher has ended, but not its processes {process_ids}: they get {signal_number.name}"
        with suppress(OSError):  # the terminal may be closed
            sys.stderr.write(f"warning: {warning}\n")
        _signal_group(group, signal_number)


def _wait_for_group(group: int, seconds: float) -> list[psutil.Process]:
    """Processes of a group that still run after some seconds; returns at once when none are left."""
    end = time.monotonic() + seconds
    while True:
        running = _processes_of(group)
        if not running or time.monotonic() > end:
            return running
        time.sleep(0.2)


def _processes_of(group: int) -> list[psutil.Process]:
    """The processes of a group that still run; zombies do not count."""
    if not _signal_group(group, 0):
        return []
    running = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def _signal_group(group: int, signal_number: int) -> bool:
    """Sends a signal, or none if it is 0, to a process group. Returns whether the group still has processes."""
    try:
        os.killpg(group, signal_number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
