# SPDX-License-Identifier: Apache-2.0
"""Starts one training process per GPU through DeepSpeed's launcher, on this machine or on several.

`dschat ppo` (dschat/cli.py) makes a `LaunchPlan` from its flags and hands it to `launch`, which runs `python -m dschat
ppo …` in every process and waits. Several machines work either with ssh between them, where --hostfile is DeepSpeed's
list of machines (lines of "name slots=8") and the command runs on one machine; or without, where the command runs on
each machine with --num_nodes, --node_rank and --master_addr.
"""

from __future__ import annotations

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
from dschat.remote import VARIABLES, check_paths, check_programs, delivered, pack, split_variables
from dschat.settings.flags import check_values, flags_of
from dschat.settings.processes import LaunchFlags

WORKER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # set by every launcher
LAUNCHER = "MA_RLHF_LAUNCHER"  # host name and process id of the process that called `launch`
ERROR_FILE = "MA_RLHF_ERROR_FILE"  # file in which the first worker that fails leaves its message
VARIABLES_FILE = "DS_ENV_FILE"  # name of DeepSpeed's file of variables for other machines
GPU_NUMBERS = re.compile(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*")  # a value of CUDA_VISIBLE_DEVICES, such as 0,1
LAUNCH_ONLY_FLAGS = ("hostfile", "node_rank", "master_addr", "master_port")  # not passed on to workers
LAUNCHER_CHECK_INTERVAL = 1.0  # seconds between two checks that the launching process still runs
# Processes that outlive the launcher ("strays") get SIGTERM after a time, and SIGKILL after another, in seconds.
STRAYS_TERM_AFTER = 60.0
STRAYS_KILL_AFTER = 300.0
EXIT_STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}  # exit status of a run that a signal has stopped


@dataclass(frozen=True)
class LaunchPlan:
    """Processes to start, and the options of DeepSpeed's launcher that start them.

    Attributes:
        num_processes: number of processes on all machines together.
        options: command-line options of the launcher.
        hosts: content of a hostfile to write for the launcher; None if it needs none or the user has given one.
        ssh: the launcher starts processes on other machines by ssh.
        hostnames: machines that the launcher reaches by ssh.
    """

    num_processes: int
    options: list[str]
    hosts: str | None = None
    ssh: bool = False
    hostnames: tuple[str, ...] = ()

    @property
    def needs_no_launcher(self) -> bool:
        """Whether the run has a single process on this machine, so that the calling process can train."""
        on_this_machine = self.hosts is None and "--hostfile" not in self.options
        return self.num_processes == 1 and not self.ssh and on_this_machine


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
    """Makes this worker stop when the process that called `launch` ends, as if it got SIGTERM: it saves a checkpoint.

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
    """Whether a process of this number runs; its start time is not compared, since the clock may have been set."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- the plan


def plan_launch(flags: LaunchFlags) -> LaunchPlan:
    """Decides which processes to start.

    Raises:
        UserError: a flag is out of range, or flags, list of machines and CUDA_VISIBLE_DEVICES contradict each other.
    """
    check_values(flags)
    port = ["--master_port", str(flags.master_port)]
    if flags.hostfile or flags.node_rank is not None or flags.num_nodes > 1:
        return _plan_machines(flags, port)
    count = flags.num_gpus or _count_gpus()
    if count == 1:
        return LaunchPlan(1, ["--num_gpus", "1", *port])
    visible = _visible_gpus()
    if not visible:
        return LaunchPlan(count, ["--num_gpus", str(count), *port])
    if count > len(visible):
        raise UserError(
            f"--num_gpus {count} (NUM_GPUS), but CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} names"
            " fewer: change one of them."
        )
    # The launcher replaces CUDA_VISIBLE_DEVICES, so it gets the GPUs as an option.
    included = ",".join(visible[:count])
    return LaunchPlan(count, ["--include", f"localhost:{included}", *port])


def _plan_machines(flags: LaunchFlags, port: Sequence[str]) -> LaunchPlan:
    """The plan for several machines, or for a hostfile of one."""
    visible = _visible_gpus()
    if visible != [str(number) for number in range(len(visible))]:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}: on several machines the launcher uses the"
            " GPUs from number 0 on; unset the variable, and set --num_gpus to the GPUs to use per machine."
        )
    options = list(port)
    if flags.num_gpus is not None:
        options = ["--num_gpus", str(flags.num_gpus), *port]
    hosts: str | None = None
    if flags.hostfile:
        slots_of = _read_hostfile(flags.hostfile)
        count = sum(flags.num_gpus or slots for slots in slots_of.values())
        options = ["--hostfile", flags.hostfile, *options]
        if flags.node_rank is None:
            # DeepSpeed's launcher starts the processes of a single machine by itself, without ssh.
            return LaunchPlan(count, options, ssh=len(slots_of) > 1, hostnames=tuple(slots_of))
    else:
        _check_nodes(flags)
        slots = flags.num_gpus or _count_gpus()
        count = slots * flags.num_nodes
        hosts = "".join(f"node-{node} slots={slots}\n" for node in range(flags.num_nodes))
    if flags.master_addr is None:
        raise UserError("--master_addr (MASTER_ADDR) is missing: give the address of the first machine.")
    options += ["--no_ssh", "--node_rank", str(flags.node_rank), "--master_addr", flags.master_addr]
    return LaunchPlan(count, options, hosts)


def _check_nodes(flags: LaunchFlags) -> None:
    """Raises UserError unless --num_nodes and --node_rank together name a machine."""
    if flags.node_rank is None:
        raise UserError("--node_rank (NODE_RANK) is missing: give 0 on the first machine, 1 on the second, …")
    if flags.num_nodes == 1:
        raise UserError("--num_nodes (NUM_NODES) is missing: give the number of machines, or --hostfile.")
    if flags.node_rank >= flags.num_nodes:
        raise UserError(
            f"--node_rank {flags.node_rank}: the last of {flags.num_nodes} machines (--num_nodes) is number"
            f" {flags.num_nodes - 1}."
        )


def _read_hostfile(hostfile: str) -> dict[str, int]:
    """Slots of each machine in a list of lines "name slots=8"."""
    try:
        lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--hostfile {hostfile}: there is no such file.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--hostfile {hostfile} is not in UTF-8: save the file in that encoding.") from error
    slots_of: dict[str, int] = {}
    for line in lines:
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        slots = words[1].removeprefix("slots=") if len(words) > 1 else ""
        if not slots.isdecimal() or int(slots) < 1:
            raise UserError(f'--hostfile {hostfile}: the line of {words[0]} must be like "{words[0]} slots=8".')
        if words[0] in slots_of:
            raise UserError(f"--hostfile {hostfile} has two lines of {words[0]}: keep one, with all slots.")
        slots_of[words[0]] = int(slots)
    if not slots_of:
        raise UserError(f'--hostfile {hostfile} names no machine: give lines like "name slots=8".')
    return slots_of


def _visible_gpus() -> list[str]:
    """GPU numbers in CUDA_VISIBLE_DEVICES; empty if the variable is empty or not set.

    Raises:
        UserError: an entry is not a number. The launcher would count the entries and use that many GPUs from number 0
            on, which may be in use by others.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not variable.strip():
        return []
    if not GPU_NUMBERS.fullmatch(variable):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={variable}: the launcher takes only GPU numbers; give the numbers that"
            " `nvidia-smi --list-gpus` shows, such as CUDA_VISIBLE_DEVICES=0,1."
        )
    return [number.strip() for number in variable.split(",")]


def _count_gpus() -> int:
    """GPUs of this machine that may be used; 1 if there are none or an empty CUDA_VISIBLE_DEVICES hides them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(_visible_gpus()) or 1
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    except OSError:
        return 1
    return sum(line.startswith("GPU ") for line in listing.splitlines()) or 1


# -- the launch


def launch(plan: LaunchPlan, words: Sequence[str]) -> int:
    """Runs `python -m dschat …` in every process of the plan, and waits for all of them.

    The first SIGTERM or Ctrl-C is passed on to the training processes, which save a checkpoint, however long that
    takes, and end; the launcher ends after them. A second signal goes to the launcher, which kills them. Processes
    that outlive the launcher are ended after a minute. At the end the message of the worker that failed first is
    repeated below the launcher's own output.

    Args:
        plan: the processes.
        words: the subcommand and its flags.

    Returns:
        The launcher's exit status; 143 after SIGTERM, 130 after Ctrl-C.

    Raises:
        UserError: another machine cannot be reached, or a program that reaches it is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        error_file = scratch / "error"
        error_file.touch()
        environment = dict(os.environ)
        environment[ERROR_FILE] = str(error_file)
        environment[LAUNCHER] = f"{socket.gethostname()} {os.getpid()}"

        # Started as a module, because a `deepspeed` on the PATH may belong to another Python.
        command = [sys.executable, "-m", "deepspeed.launcher.runner"]
        if plan.hosts is not None:
            hostfile = scratch / "hostfile"
            hostfile.write_text(plan.hosts, encoding="utf-8")
            command += ["--hostfile", str(hostfile)]
        command += [*plan.options, "--module", "--no_local_rank", "dschat"]

        if plan.ssh:
            status = _run_by_ssh([*command, *pack(words)], environment, plan.hostnames, scratch)
        else:
            with LauncherSignals(local=True) as signals:
                status = run_launcher([*command, *words], environment, signals)
        sys.stderr.write(error_file.read_text(encoding="utf-8"))
    return status


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
    with LauncherSignals(local=False) as signals, delivered(variables.delivered, hosts) as file:
        if signals.last is not None:  # a signal came while the variables were sent
            return EXIT_STATUS[signals.last]
        exported = variables.exported | {VARIABLES: file}
        exports = scratch / "variables"
        lines = [f"{name}={value}\n" for name, value in exported.items()]
        exports.write_text("".join(lines), encoding="utf-8")
        # Processes that the launcher starts on this machine read its environment instead of that file.
        launcher_environment = variables.launcher | {VARIABLES_FILE: str(exports), VARIABLES: file}
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
        return EXIT_STATUS[signals.last]
    return status if status >= 0 else 128 - status


def _launcher_variables() -> dict[str, str]:
    """Variables for other machines from DeepSpeed's .deepspeed_env; the current folder's file overrides the home's.

    Raises:
        UserError: a line is not NAME=value.
    """
    name = Path(os.environ.get(VARIABLES_FILE, ".deepspeed_env"))
    files = dict.fromkeys([Path.home() / name, Path.cwd() / name])  # each once
    variables: dict[str, str] = {}
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for number, line in enumerate(lines, start=1):
            variable, equals, value = line.strip().partition("=")
            if not variable or variable.startswith("#"):
                continue
            if not equals:
                raise UserError(f"{file}:{number}: the line is not NAME=value; correct it, or begin it with #.")
            variables[variable.strip()] = value.strip()
    return variables


# -- signals and processes of the launcher


class LauncherSignals:
    """Context in which SIGTERM and Ctrl-C do not end this process but are passed on to the launcher's processes.

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
        self._launcher: int | None = None  # its process group
        self._earlier_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> LauncherSignals:
        """Installs the handlers."""
        for number in EXIT_STATUS:
            self._earlier_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restores the earlier handlers."""
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def pass_to(self, launcher: int | None) -> None:
        """Sets the process group that gets signals, or None; a signal that has already come is passed on at once."""
        self._launcher = launcher
        if launcher is not None and self.last is not None:
            _signal_group(launcher, self.last)

    def _handle(
        self,
        number: int,
        frame: FrameType | None,
    ) -> None:
        """Passes a signal on: the first one to the training processes, a later one to the launcher."""
        is_first = self.last is None
        self.last = signal.Signals(number)
        if self._launcher is None:
            return
        training = _training_processes(self._launcher) if is_first and self._local else []
        for process in training:
            with suppress(psutil.Error):  # it has just ended
                process.send_signal(number)
        if not training:
            _signal_group(self._launcher, number)


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
    for patience, number in ((STRAYS_TERM_AFTER, signal.SIGTERM), (STRAYS_KILL_AFTER, signal.SIGKILL)):
        strays = _wait_for_group(group, patience)
        if not strays:
            return
        numbers = ", ".join(str(process.pid) for process in strays)
        sys.stderr.write(f"warning: the launcher has ended, but not its processes {numbers}: they get {number.name}\n")
        _signal_group(group, number)


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


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group. Returns whether the group still has processes."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
