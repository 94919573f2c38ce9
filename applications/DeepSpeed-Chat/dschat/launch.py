# SPDX-License-Identifier: Apache-2.0
"""Training on several processes: which GPUs and machines, DeepSpeed's launcher, signals, and what ended the run.

Several machines, either with ssh between them: --hostfile, DeepSpeed's list of machines, lines of "name slots=8", on
one of them; or without, on each of them: --num_nodes, --node_rank and --master_addr.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import FrameType

import psutil

from dschat.errors import UserError
from dschat.remote import VARIABLES, check_paths, check_programs, delivered, pack, split_variables
from dschat.settings.flags import check_values, flags_of
from dschat.settings.processes import LaunchFlags

LAUNCHER = "MA_RLHF_LAUNCHER"  # the process that has started the launcher: its machine and number
ERROR_FILE = "MA_RLHF_ERROR_FILE"  # where the first process that fails leaves why
VARIABLES_FILE = "DS_ENV_FILE"  # names the launcher's list of variables for other machines
NUMBERS = re.compile(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*")
OF_A_MACHINE = ("hostfile", "node_rank", "master_addr", "master_port")  # flags that processes are not told
FOLLOWED_EVERY = 1.0  # seconds
# Seconds that processes which the launcher has left behind may go on, and then, after SIGTERM, take to save and end.
STRAYS_GO_ON, STRAYS_END = 60.0, 300.0
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}


@dataclass(frozen=True)
class Processes:
    """What is started."""

    count: int  # on all machines
    options: list[str]  # the launcher's own
    hosts: str | None = None  # content of the list of machines where there is none yet
    ssh: bool = False  # the launcher starts those of other machines
    hostnames: tuple[str, ...] = ()  # the machines that it reaches by ssh

    @property
    def alone(self) -> bool:
        """Whether this process may do it itself."""
        return self.count == 1 and not self.ssh and self.hosts is None and "--hostfile" not in self.options


def is_rank() -> bool:
    """Whether a launcher has started this process."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= {*os.environ}


def follow_launcher() -> None:
    """Stops this process as by SIGTERM, with a checkpoint, once what started it is gone: killed by SIGKILL.

    Else the processes that train would go on by themselves, and keep their GPUs and their port. Processes that ssh
    has started, or of another machine, follow nothing.
    """
    machine, _, number = os.environ.get(LAUNCHER, "").rpartition(" ")
    if machine != socket.gethostname():
        return

    # By number alone: when a process started is read from a clock that may be set meanwhile.
    def is_there() -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(int(number)).status() != psutil.STATUS_ZOMBIE
        return False

    def follow() -> None:
        while is_there():
            time.sleep(FOLLOWED_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=follow, daemon=True).start()


def variables_of_a_rank() -> dict[str, str]:
    """The environment without what `LaunchFlags` reads: a launcher's MASTER_ADDR and so on are for its processes."""
    machines = {flag.environment for flag in flags_of(LaunchFlags).values()}
    return {name: value for name, value in os.environ.items() if name not in machines}


def plan_processes(flags: LaunchFlags) -> Processes:
    """Which processes there will be.

    Raises:
        UserError: a flag is out of range; flags, the list of machines and CUDA_VISIBLE_DEVICES do not fit together.
    """
    check_values(flags)
    port = ["--master_port", str(flags.master_port)]
    if flags.hostfile or flags.node_rank is not None or flags.num_nodes > 1:
        return _on_machines(flags, port)
    count = flags.num_gpus or _count_gpus()
    if count == 1:
        return Processes(1, ["--num_gpus", "1", *port])
    visible = _visible_gpus()
    if not visible:
        return Processes(count, ["--num_gpus", str(count), *port])
    if count > len(visible):
        raise UserError(
            f"--num_gpus {count} (NUM_GPUS), but CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} names"
            " fewer: change one of them."
        )
    # The launcher replaces CUDA_VISIBLE_DEVICES, so it has to be told.
    return Processes(count, ["--include", f"localhost:{','.join(visible[:count])}", *port])


def launch(processes: Processes, words: Sequence[str]) -> int:
    """Runs `dschat` with these words in every process.

    Waits for all of them; those that outlive the launcher are ended after a minute. The first SIGTERM or Ctrl-C goes
    to the processes that train, which save a checkpoint however long that takes and end; the launcher follows them. It
    would kill them after 30 seconds, and does so at a second signal. What ended the run is repeated last, below the
    launcher's own lines.

    Returns:
        The launcher's exit status; 143 after SIGTERM, 130 after Ctrl-C.
    """
    with tempfile.TemporaryDirectory() as scratch:
        error = Path(scratch) / "error"
        error.touch()
        environment = {**os.environ, ERROR_FILE: str(error), LAUNCHER: f"{socket.gethostname()} {os.getpid()}"}
        options = list(processes.options)
        if processes.hosts is not None:
            hosts = Path(scratch) / "hostfile"
            hosts.write_text(processes.hosts, encoding="utf-8")
            options = ["--hostfile", str(hosts), *options]
        # That of this environment: another one's, first on the PATH, would start its own Python.
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
        command = [*launcher, *options, "--module", "--no_local_rank", "dschat"]
        if processes.ssh:
            status = _run_by_ssh([*command, *pack(words)], environment, processes.hostnames, Path(scratch))
        else:
            status = _run([*command, *words], environment, local=True)
        sys.stderr.write(error.read_text(encoding="utf-8"))
    return status


def _run_by_ssh(command: Sequence[str], environment: Mapping[str, str], hosts: Sequence[str], scratch: Path) -> int:
    """Runs the launcher for several machines; `scratch` is a folder for its list of variables."""
    check_paths()
    check_programs()
    split = split_variables(environment, _launcher_variables())
    received: list[int] = []
    with _handled(lambda number, frame: received.append(number)), delivered(split.delivered, hosts) as file:
        if received:  # while variables were sent
            return STATUS[signal.Signals(received[-1])]
        variables = split.exported | {VARIABLES: file}
        listed = scratch / "variables"
        listed.write_text("".join(f"{name}={value}\n" for name, value in variables.items()), encoding="utf-8")
        # Processes that the launcher starts by itself, without ssh, read its environment and not the list.
        told = split.launcher | {VARIABLES_FILE: str(listed), VARIABLES: file}
        return _run(command, told, local=False, received=received)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C call a handler and interrupt nothing."""
    before = {number: signal.signal(number, handler) for number in STATUS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _run(
    command: Sequence[str], environment: Mapping[str, str], local: bool, received: list[int] | None = None
) -> int:
    """Runs the launcher in a process group of its own, and passes signals on.

    Args:
        command: the launcher's.
        environment: the launcher's.
        local: the processes that train are on this machine.
        received: signals that have come before, to which this adds.
    """
    received = [] if received is None else received
    job: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        first = not received
        received.append(number)
        if job is None:  # passed on once the launcher is there
            return
        training = _training_processes(job.pid) if first and local else []
        for process in training:
            with suppress(psutil.Error):  # it has just ended
                process.send_signal(number)
        if not training:
            _signal_group(job.pid, number)

    with _handled(pass_on):
        job = subprocess.Popen(command, env=environment, process_group=0)
        if received:
            _signal_group(job.pid, received[-1])
        status = job.wait()
        _end_strays(job.pid)
    return STATUS[signal.Signals(received[-1])] if received else status if status >= 0 else 128 - status


def _end_strays(group: int) -> None:
    """Waits for processes that the launcher has left in its group, and ends those that go on.

    They would keep their GPUs and their port: a process that trains after its launcher was killed, or a worker that no
    signal has reached.
    """
    for patience, number in ((STRAYS_GO_ON, signal.SIGTERM), (STRAYS_END, signal.SIGKILL)):
        end = time.monotonic() + patience
        while strays := _processes_of(group):
            if time.monotonic() > end:
                numbers = ", ".join(str(process.pid) for process in strays)
                sys.stderr.write(
                    f"warning: the launcher has ended, but not its processes {numbers}: they get {number.name}\n"
                )
                _signal_group(group, number)
                break
            time.sleep(0.2)
        if not strays:
            return


def _processes_of(group: int) -> list[psutil.Process]:
    """The processes of a group that still run: a zombie that nobody reaps has ended."""
    if not _signal_group(group, 0):
        return []
    running = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def _training_processes(launcher: int) -> list[psutil.Process]:
    """Grandchildren of the launcher, on this machine; none before they are there."""
    try:
        return [process for child in psutil.Process(launcher).children() for process in child.children()]
    except psutil.Error:
        return []


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group; whether it still has processes."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _visible_gpus() -> list[str]:
    """The numbers in CUDA_VISIBLE_DEVICES; none where it is empty or not set.

    Of anything else the launcher would only keep the count, and use that many GPUs from 0 on, which may be somebody
    else's.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not given.strip():
        return []
    if not NUMBERS.fullmatch(given):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={given}: the launcher takes GPUs by number alone; give the numbers that"
            " `nvidia-smi --list-gpus` shows, such as CUDA_VISIBLE_DEVICES=0,1."
        )
    return [number.strip() for number in given.split(",")]


def _count_gpus() -> int:
    """GPUs of this machine that may be used; 1 without any, or where an empty CUDA_VISIBLE_DEVICES hides them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len(_visible_gpus()) or 1
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    except OSError:
        return 1
    return sum(line.startswith("GPU ") for line in listed.splitlines()) or 1


def _on_machines(flags: LaunchFlags, port: Sequence[str]) -> Processes:
    visible = _visible_gpus()
    if visible != [str(place) for place in range(len(visible))]:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}: on several machines the launcher uses the"
            " GPUs from 0 on; unset the variable and give the first --num_gpus of each to this run."
        )
    hosts = None
    if flags.hostfile is None:
        if flags.node_rank is None:
            raise UserError("--node_rank (NODE_RANK) is missing: give 0 on the first machine, 1 on the second, …")
        if flags.node_rank >= flags.num_nodes > 1:
            raise UserError(
                f"--node_rank {flags.node_rank}: the last of {flags.num_nodes} machines (--num_nodes) is number"
                f" {flags.num_nodes - 1}."
            )
        if flags.num_nodes == 1:
            raise UserError("--num_nodes (NUM_NODES) is missing: give the number of machines, or --hostfile.")
        slots = flags.num_gpus or _count_gpus()
        hosts = "".join(f"node-{node} slots={slots}\n" for node in range(flags.num_nodes))
        count, options = slots * flags.num_nodes, []
    else:
        slots_of = _read_hosts(flags.hostfile)
        count = sum(flags.num_gpus or slots for slots in slots_of.values())
        options = ["--hostfile", flags.hostfile]
    if flags.num_gpus is not None:
        options += ["--num_gpus", str(flags.num_gpus)]
    options += port
    if flags.node_rank is None:
        # The launcher starts the processes of a single machine by itself, without ssh.
        return Processes(count, options, hosts, ssh=len(slots_of) > 1, hostnames=tuple(slots_of))
    if flags.master_addr is None:
        raise UserError("--master_addr (MASTER_ADDR) is missing: give the address of the first machine.")
    options += ["--no_ssh", "--node_rank", str(flags.node_rank), "--master_addr", flags.master_addr]
    return Processes(count, options, hosts)


def _read_hosts(hostfile: str) -> dict[str, int]:
    """The machines of a list with their numbers of slots."""
    try:
        lines = Path(hostfile).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--hostfile {hostfile}: there is no such file.") from error
    slots_of: dict[str, int] = {}
    for words in (line.split() for line in lines):
        if not words or words[0].startswith("#"):
            continue
        slots = words[1].removeprefix("slots=") if len(words) > 1 else ""
        if not slots.isdecimal() or int(slots) < 1:
            raise UserError(f'--hostfile {hostfile}: the line of {words[0]} must be like "{words[0]} slots=8".')
        slots_of[words[0]] = int(slots)
    if not slots_of:
        raise UserError(f'--hostfile {hostfile} names no machine: give lines like "name slots=8".')
    return slots_of


def _launcher_variables() -> dict[str, str]:
    """Variables of the file that DeepSpeed's launcher reads: of the home folder, then of the current one.

    Raises:
        UserError: a line of it is not NAME=value.
    """
    given = Path(os.environ.get(VARIABLES_FILE, ".deepspeed_env"))
    variables: dict[str, str] = {}
    for file in dict.fromkeys([Path.home() / given, Path.cwd() / given]):
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for number, line in enumerate(lines, start=1):
            name, equals, value = line.strip().partition("=")
            if not name or name.startswith("#"):
                continue
            if not equals:
                raise UserError(f"{file}:{number}: the line is not NAME=value; correct it, or begin it with #.")
            variables[name.strip()] = value.strip()
    return variables
