# SPDX-License-Identifier: Apache-2.0
"""Runs one program once inside a sandbox: the parent's half. The child's half is `inside/main.py`.

At the levels "bubblewrap" and "namespaces" the program has no network, sees no other processes and no files but the
interpreter's, can write none, and has limits on time, memory, output, open files, and threads and processes. All its
processes are killed at the end. At "rlimits" it has the same limits but for threads and processes, and writes no byte
to a file. There, Landlock and seccomp, where the kernel has them, keep it from files, sockets and new processes;
without them nothing does, and processes that leave the program's session are not killed.

No level protects from bugs of the kernel, or from programs that measure or load the machine within their limits.
"""

from __future__ import annotations

import marshal
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from typing import IO, Literal

from dschat.programs.inside.job import JobFile
from dschat.programs.inside.namespaces import DEVICES, OURS, PROGRAM, WORK

Level = Literal["bubblewrap", "namespaces", "rlimits"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "namespaces", "rlimits")  # strongest first
HERE = Path(__file__).resolve().parent
# Arguments: this folder, the level, and the child's ends of the pipes in the order of `_Pipes.child_ends`.
CHILD_CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from inside.main import main
main(sys.argv[2], *map(int, sys.argv[3:]))
"""
# All environment variables of the child, which inherits none. With this seed, hashes are the same in every run.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
SET_UP_SECONDS = 20.0  # for the sandbox and the interpreter, before the program's own time begins
MAX_MESSAGE = 4096  # bytes read from a report
CHUNK = 2**16  # bytes read at once
SMALL_CHUNK = 2**12
SHORTEST_WAIT = 0.05  # seconds that a program which has closed its output has to end, even if its time is over
# Bytes of a report, see `inside/main.py`: the sandbox is set up, the source compiles, or it does not.
SET_UP = b"R"
COMPILED = b"C"
NOT_COMPILED = b"E"

# Why reading ended: all pipes were closed, the time was over, or there was too much output.
End = Literal["exit", "time", "output"]


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one test; `program_seconds` is for all tests of a program."""

    seconds: float = 4.0  # wall-clock time; processor time has the same limit
    program_seconds: float = 60.0  # wall-clock time of all tests of a program
    memory: int = 2**30  # bytes of address space, including whole stacks of threads
    output_bytes: int = 8 * 2**20  # printed or returned
    open_files: int = 64
    threads: int = 64  # threads and processes at the same time


@dataclass(frozen=True)
class SandboxJob:
    """Input of a sandbox."""

    source: str
    text: str = ""  # on standard input
    function: str | None = None
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True)
class Execution:
    """Result of a run in a sandbox."""

    started: bool  # whether the sandbox was set up; otherwise nothing is known about the program
    compiled: bool | None  # None if the program ended before that was reported
    end: End  # ended by itself, timed out, or had too much output
    status: int  # exit status; 128 + n for signal n, also if this process has killed it
    output: bytes  # printed or returned by the program
    message: str  # text of its exception, or why the sandbox could not be set up
    seconds_since_setup: float  # from then until all processes have ended


def execute(job: SandboxJob, limits: SandboxLimits, level: Level) -> Execution:
    """Runs a program once. It can only return data.

    Args:
        job: the program and its input.
        limits: resource limits.
        level: sandbox level.

    Raises:
        OSError: no process could be started.
    """
    with ExitStack() as stack:
        process, pipes = _start(job, limits, level, stack)
        assert process.stdout is not None
        try:
            with process.stdout:
                reader = _PipeReader(process.stdout.fileno(), pipes, limits)
                end = reader.read_all()
            status = _wait(process, reader.deadline) if end == "exit" else None
        finally:
            _kill(process, level)
    if status is None:  # it was killed
        status = 128 + signal.SIGKILL
        if end == "exit":  # it had closed its pipes, but did not end in time
            end = "time"
    report = bytes(reader.data[pipes.report])
    started = report[:1] == SET_UP
    message = report[2:] if started else report[1:]
    return Execution(
        started=started,
        compiled={COMPILED: True, NOT_COMPILED: False}.get(report[1:2]),
        end=end,
        status=status,
        output=bytes(reader.data[reader.output]),
        message=message.decode(errors="replace"),
        seconds_since_setup=reader.seconds_since_setup(),
    )


@dataclass(frozen=True)
class _Pipes:
    """Pipes between this process and its child.

    Attributes:
        report: from which the child's report is read, see `inside/main.py`.
        info: from which the id of the process in the new namespaces is read.
        mapped: to which something is written when the users of the new namespace are mapped.
        child_ends: the child's ends of `report`, `info` and `mapped`.
    """

    report: int
    info: int
    mapped: int
    child_ends: tuple[int, int, int]


def _start(
    job: SandboxJob, limits: SandboxLimits, level: Level, stack: ExitStack
) -> tuple[subprocess.Popen[bytes], _Pipes]:
    """Starts the child; `stack` closes the pipes and removes the files. Raises OSError."""
    # At the other levels the program has a working folder of its own root, and the child starts in /.
    folder = "/"
    if level == "rlimits":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True))
    job_file = stack.enter_context(_job_file(job, limits, level))
    with ExitStack() as child_stack:  # this process needs the child's ends until the child has them
        report, report_end = _open_pipe(stack, child_stack)
        info, info_end = _open_pipe(stack, child_stack)
        mapped_end, mapped = _open_pipe(child_stack, stack)
        pipes = _Pipes(report, info, mapped, (report_end, info_end, mapped_end))
        process = subprocess.Popen(
            _command(level, pipes.child_ends),
            stdin=job_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=pipes.child_ends,
            env=ENVIRONMENT,
            cwd=folder,
            start_new_session=True,
            bufsize=0,
        )
    return process, pipes


def _open_pipe(read_stack: ExitStack, write_stack: ExitStack) -> tuple[int, int]:
    """The ends of a new pipe for reading and for writing, each closed by its stack."""
    read_end, write_end = os.pipe()
    read_stack.callback(os.close, read_end)
    write_stack.callback(os.close, write_end)
    return read_end, write_end


class _PipeReader:
    """Reads output, report and info until all are closed or a limit is exceeded.

    When the id of a process in new namespaces comes from `info`, this process maps the users of the namespace.

    Attributes:
        output: the descriptor from which the program's output is read.
        data: what was read from each descriptor.
        deadline: when the time is over; replaced when the sandbox is set up.
    """

    def __init__(self, output: int, pipes: _Pipes, limits: SandboxLimits) -> None:
        self.output = output
        self.data = {output: bytearray(), pipes.report: bytearray(), pipes.info: bytearray()}
        self.deadline = time.monotonic() + SET_UP_SECONDS
        self._pipes = pipes
        self._limits = limits
        self._set_up_at: float | None = None

    def seconds_since_setup(self) -> float:
        """Seconds since the sandbox was set up; 0 if it was not."""
        return 0.0 if self._set_up_at is None else time.monotonic() - self._set_up_at

    def read_all(self) -> End:
        """Reads, and returns why that ended; after "exit" the process may still exist."""
        max_sizes = {
            self.output: self._limits.output_bytes,
            self._pipes.report: MAX_MESSAGE,
            self._pipes.info: MAX_MESSAGE,
        }
        with selectors.DefaultSelector() as selector:
            for pipe in max_sizes:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                remaining = self.deadline - time.monotonic()
                ready = selector.select(remaining) if remaining > 0 else []
                if not ready:
                    return "time"
                for key, _ in ready:
                    chunk = os.read(key.fd, CHUNK)
                    self._add(key.fd, chunk)
                    if not chunk:
                        selector.unregister(key.fd)
                    elif len(self.data[key.fd]) > max_sizes[key.fd]:
                        return "output"
                    elif len(chunk) < SMALL_CHUNK:
                        time.sleep(0.001)  # so that a flood of single bytes costs this process little
        return "exit"

    def _add(self, pipe: int, chunk: bytes) -> None:
        """Adds a chunk to the data of a pipe, and acts on the first one of report and info."""
        is_first = bool(chunk) and not self.data[pipe]
        if pipe == self._pipes.report and is_first:
            self._set_up_at = time.monotonic()
            self.deadline = self._set_up_at + self._limits.seconds
        if pipe == self._pipes.info and is_first:
            _map_users(chunk, self._pipes.mapped)
        self.data[pipe] += chunk


def _job_file(job: SandboxJob, limits: SandboxLimits, level: Level) -> IO[bytes]:
    """A temporary file with the job, from which the child reads it."""
    content: JobFile = {
        "source": job.source.encode(errors="surrogatepass"),
        "input": job.text.encode(errors="surrogatepass"),
        "function": job.function,
        "arguments": job.arguments,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "files": limits.open_files,
        "threads": None if level == "rlimits" else limits.threads,
        "readable": interpreter_folders(),
        "hidden": package_folders(),
    }
    file = tempfile.TemporaryFile()
    file.write(marshal.dumps(dict(content)))
    file.seek(0)
    return file


def _map_users(info: bytes, mapped: int) -> None:
    """Maps the users of a new namespace: ours and, if permitted, one for the program alone.

    Args:
        info: id of the process that has the namespace; from bubblewrap, JSON whose first number it is.
        mapped: the descriptor from which that process waits for data.

    Raises:
        OSError: the system does not allow it.
    """
    process_id = re.findall(r"\d+", info.decode())[0]
    process = Path("/proc", process_id)
    our_user = f"{OURS} {os.geteuid()} 1"
    (process / "setgroups").write_text("deny")
    (process / "gid_map").write_text(f"{OURS} {os.getegid()} 1")
    try:
        (process / "uid_map").write_text(f"{our_user}\n{PROGRAM} {PROGRAM} 1")
    except OSError:
        (process / "uid_map").write_text(our_user)
    os.write(mapped, b"go")


def _command(level: Level, child_ends: tuple[int, int, int]) -> list[str]:
    """The command of the child."""
    python = os.path.realpath(sys.executable)
    options = ["-S", "-s", "-B", "-P", "-X", "utf8"]
    command = [python, *options, "-c", CHILD_CODE, str(HERE), level, *map(str, child_ends)]
    if level == "bubblewrap":
        return [*_bubblewrap(python, child_ends), *command]
    return command


def _bubblewrap(python: str, child_ends: tuple[int, int, int]) -> list[str]:
    """The command of bubblewrap, before that of the interpreter."""
    command = [bubblewrap() or "bwrap", "--unshare-all", "--unshare-user", "--die-with-parent"]
    command += ["--cap-drop", "ALL", "--as-pid-1"]
    if os.geteuid() == 0:
        # The kernel does not limit root's threads, so the program gets a user of its own, whom this process maps.
        # Without these options bubblewrap maps the user who runs it.
        _, info_end, mapped_end = child_ends
        command += ["--cap-add", "CAP_SETUID"]
        command += ["--info-fd", str(info_end), "--userns-block-fd", str(mapped_end)]
        for path in (*interpreter_folders(), *DEVICES):
            for parent in reversed(Path(path).parents):  # the program's user must be able to enter them
                command += ["--dir", str(parent)]
    for path in interpreter_folders():
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    # Packages are hidden before what the child needs is put in place, which may be one of them.
    for path in package_folders():
        command += ["--tmpfs", path]
    for path in (python, str(HERE / "inside")):
        command += ["--ro-bind", path, path]
    for path in package_folders():
        command += ["--remount-ro", path]
    for path in DEVICES:
        command += ["--dev-bind", path, path]
    return [*command, "--hostname", "sandbox", "--dir", WORK, "--chdir", WORK, "--remount-ro", "/"]


@cache
def bubblewrap() -> str | None:
    """The program of the level "bubblewrap", which the child's empty environment would not find; None without it."""
    return shutil.which("bwrap")


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The exit status; None if the process does not end before the deadline."""
    try:
        status = process.wait(max(SHORTEST_WAIT, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return 128 - status if status < 0 else status


def _kill(process: subprocess.Popen[bytes], level: Level) -> None:
    """Kills all processes of a run and waits for them.

    Where there is a namespace of processes, the end of its first process ends all others. At "rlimits" there is none:
    the processes of the session are killed, and seccomp, where the kernel has it, keeps them from leaving it.
    """
    if process.poll() is None and level != "rlimits":
        for child in _children(process.pid):  # the outer process ends together with the inner one
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
    if process.returncode is None or level == "rlimits":
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _children(process: int) -> list[int]:
    """The ids of a process's children; none if it has ended."""
    try:
        process_ids = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(process_id) for process_id in process_ids.split()]


@cache
def interpreter_folders() -> list[str]:
    """Folders that Python needs: its standard library, and shared libraries, its own and the system's."""
    folders = []
    for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"):
        if os.path.exists(path):
            folders.append(path)
    python_folders: list[str] = []
    libraries = glob(os.path.join(sys.base_prefix, "lib", "*.so*"))  # of an interpreter with its own libraries
    if libraries:
        python_folders.append(os.path.dirname(libraries[0]))
    for name in ("stdlib", "platstdlib"):
        python_folders.append(sysconfig.get_path(name, vars={"platbase": sys.base_exec_prefix}))
    for path in map(os.path.realpath, python_folders):
        if not any(Path(path).is_relative_to(folder) for folder in folders):
            folders.append(path)
    return folders


@cache
def package_folders() -> list[str]:
    """Folders of installed packages in `interpreter_folders`, which programs do not see."""
    folders: set[str] = set()
    for interpreter_folder in interpreter_folders():
        for parent in (interpreter_folder, *glob(f"{interpreter_folder}/python3*/")):
            for name in ("site-packages", "dist-packages"):
                path = os.path.realpath(os.path.join(parent, name))
                if os.path.isdir(path):
                    folders.add(path)
    return sorted(folders)
