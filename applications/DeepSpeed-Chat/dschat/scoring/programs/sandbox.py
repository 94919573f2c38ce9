# SPDX-License-Identifier: Apache-2.0
"""Runs one program once inside a sandbox, seen from outside; `inside.main` is the other side."""

from __future__ import annotations

import marshal
import os
import re
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from typing import IO, Literal

from dschat.scoring.programs.inside.job import JobFile
from dschat.scoring.programs.inside.namespaces import DEVICES, OURS, PROGRAM, WORK

Level = Literal["bubblewrap", "namespaces", "rlimits"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "namespaces", "rlimits")  # strongest first
HERE = Path(__file__).resolve().parent
START = "import sys; sys.path.insert(0, {here!r}); from inside.main import main; main({level!r}, *{ends})"
# Nothing is inherited from the parent; hashes are the same in every run.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
SET_UP_SECONDS = 20.0  # for the sandbox and the interpreter, before the program's own time begins
MAX_MESSAGE = 4096  # bytes read from a report
CHUNK = 2**16  # bytes read at once
SMALL_CHUNK = 2**12


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one test, unless stated otherwise."""

    seconds: float = 4.0  # wall-clock time, and processor time
    program_seconds: float = 60.0  # wall-clock time of all tests of a program
    memory: int = 2**30  # bytes of address space, including whole stacks of threads
    file_bytes: int = 16 * 2**20  # of one file, and of the working folder
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
    end: Literal["exit", "time", "output"]  # ended by itself, timed out, or had too much output
    status: int  # exit status; 128 + n for signal n
    output: bytes  # printed or returned by the program
    message: str  # text of its exception, or why the sandbox could not be set up
    seconds: float  # from start to end
    ran: float  # seconds since the sandbox was set up


def execute(
    job: SandboxJob,
    limits: SandboxLimits,
    level: Level,
) -> Execution:
    """Runs a program once. It can only return data, and all its processes are ended.

    Args:
        job: the program and its input.
        limits: resource limits.
        level: sandbox level.

    Raises:
        OSError: no process could be started.
    """
    start = time.monotonic()
    with ExitStack() as stack:
        # At the other levels, the program has a working folder in memory.
        folder = stack.enter_context(_temporary_folder()) if level == "rlimits" else "/"
        job_file = stack.enter_context(_job_file(job, limits, level))
        report, report_end = os.pipe()
        info, info_end = os.pipe()
        mapped_end, mapped = os.pipe()
        for pipe in (report, info, mapped):
            stack.callback(os.close, pipe)
        inner_ends = (report_end, info_end, mapped_end)
        try:
            process = subprocess.Popen(
                _command(level, inner_ends, limits),
                stdin=job_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=inner_ends,
                env=ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
                bufsize=0,
            )
        finally:
            for pipe in inner_ends:
                os.close(pipe)
        assert process.stdout is not None
        try:
            with process.stdout:
                reader = _PipeReader(process.stdout.fileno(), report, info, mapped, limits)
                end = reader.read_all()
            status = _wait(process, reader.deadline) if end == "exit" else None
        finally:
            _kill(process, level)
    content = bytes(reader.data[report])
    started = content[:1] == b"R"
    message = content[2:] if started else content[1:]
    return Execution(
        started=started,
        compiled={b"C": True, b"E": False}.get(content[1:2]),
        end="time" if end == "exit" and status is None else end,
        status=128 + signal.SIGKILL if status is None else status,
        output=bytes(reader.data[reader.output]),
        message=message.decode(errors="replace"),
        seconds=time.monotonic() - start,
        ran=reader.seconds_running(),
    )


class _PipeReader:
    """Reads output, report and info until all are closed or a limit is exceeded.

    The process in the new namespaces, or bubblewrap, writes an id to `info`; then its namespace's users are mapped.
    """

    def __init__(
        self,
        output: int,
        report: int,
        info: int,
        mapped: int,
        limits: SandboxLimits,
    ) -> None:
        self.output = output
        self.report = report
        self.info = info
        self.mapped = mapped
        self.limits = limits
        self.data = {output: bytearray(), report: bytearray(), info: bytearray()}
        self.running_since: float | None = None  # when the sandbox was set up
        self.deadline = time.monotonic() + SET_UP_SECONDS  # replaced when the sandbox is set up

    def seconds_running(self) -> float:
        """Seconds since the sandbox was set up."""
        return 0.0 if self.running_since is None else time.monotonic() - self.running_since

    def read_all(self) -> Literal["exit", "time", "output"]:
        """Reads, and returns `Execution.end`; "exit" if all are closed, though the process may still exist."""
        max_sizes = {self.output: self.limits.output_bytes, self.report: MAX_MESSAGE, self.info: MAX_MESSAGE}
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
        is_first = bool(chunk) and not self.data[pipe]
        if pipe == self.report and is_first:
            self.running_since = time.monotonic()
            self.deadline = self.running_since + self.limits.seconds
        if pipe == self.info and is_first:
            _map_users(chunk, self.mapped)
        self.data[pipe] += chunk


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder that is removed with everything in it, however deep, but without what is mounted there."""
    folder = tempfile.mkdtemp(prefix="program-")
    try:
        yield folder
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--one-file-system", folder])


def _job_file(
    job: SandboxJob,
    limits: SandboxLimits,
    level: Level,
) -> IO[bytes]:
    content: JobFile = {
        "source": job.source.encode(errors="surrogatepass"),
        "input": job.text.encode(errors="surrogatepass"),
        "function": job.function,
        "arguments": job.arguments,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "file_bytes": limits.file_bytes,
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
    """Maps the users of a new namespace: ours and, if permitted, one for the program alone. Raises OSError.

    `info` begins with the id of the process that has the namespace and waits for data on `mapped`.
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


def _command(
    level: Level,
    ends: tuple[int, int, int],
    limits: SandboxLimits,
) -> list[str]:
    python = os.path.realpath(sys.executable)
    code = START.format(here=str(HERE), level=level, ends=ends)
    command = [python, "-S", "-s", "-B", "-P", "-X", "utf8", "-c", code]
    return [*_bubblewrap(python, limits, ends), *command] if level == "bubblewrap" else command


def _bubblewrap(
    python: str,
    limits: SandboxLimits,
    ends: tuple[int, int, int],
) -> list[str]:
    """The command of bubblewrap, before that of the interpreter."""
    command = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL", "--as-pid-1"]
    if os.geteuid() == 0:  # otherwise bubblewrap maps the user, whose threads the kernel limits
        _, info_end, mapped_end = ends
        command += (
            f"--cap-add CAP_SETUID --cap-add CAP_CHOWN --info-fd {info_end} --userns-block-fd {mapped_end}".split()
        )
        for path in (*interpreter_folders(), *DEVICES):
            for parent in reversed(Path(path).parents):  # the program's user must be able to enter them
                command += ["--dir", str(parent)]
    for path in interpreter_folders():
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    for path in (python, str(HERE / "inside")):
        command += ["--ro-bind", path, path]
    for path in package_folders():
        command += ["--tmpfs", path, "--remount-ro", path]
    for path in DEVICES:
        command += ["--dev-bind", path, path]
    command += ["--hostname", "sandbox", "--size", str(limits.file_bytes), "--tmpfs", WORK, "--chdir", WORK]
    return [*command, "--remount-ro", "/"]


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The exit status; None if the process does not end before the deadline."""
    try:
        status = process.wait(max(0.05, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return 128 - status if status < 0 else status


def _kill(process: subprocess.Popen[bytes], level: Level) -> None:
    """Kills all processes of a run and waits for them."""
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
    try:
        return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
    except OSError:
        return []


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
