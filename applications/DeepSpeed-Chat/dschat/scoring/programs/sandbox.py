# SPDX-License-Identifier: Apache-2.0
"""One run of one program inside a sandbox, seen from outside."""

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
# Nothing of the parent's; hashes are the same in every run.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
SET_UP_SECONDS = 20.0  # for the walls and the interpreter, before the program's own time begins
MESSAGE = 4096  # bytes read of a report
CHUNK, SMALL = 2**16, 2**12


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use: limits of one test, except where another thing is said."""

    seconds: float = 4.0  # of the clock, and of the processor
    program_seconds: float = 60.0  # of the clock, all tests of a program together
    memory: int = 2**30  # bytes of address space; a thread's stack counts whole
    file_bytes: int = 16 * 2**20  # of one file, and of its folder
    output_bytes: int = 8 * 2**20  # printed or returned
    open_files: int = 64
    threads: int = 64  # and processes, at a time


@dataclass(frozen=True)
class SandboxJob:
    """What enters a sandbox."""

    source: str
    text: str = ""  # on standard input
    function: str | None = None
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True)
class Execution:
    """What came out of it."""

    started: bool  # the walls stood; otherwise nothing is known of the program
    compiled: bool | None  # None if it ended before that was known
    end: Literal["exit", "time", "output"]  # how it ended: by itself, of its time, or because its output was too long
    status: int  # exit status; 128 + n for signal n
    output: bytes  # what it printed or returned
    message: str  # the text of its exception, or why the walls do not stand
    seconds: float  # from the start to the end
    ran: float  # those of them since the walls stand


def execute(job: SandboxJob, limits: SandboxLimits, level: Level) -> Execution:
    """Runs a program once. It can only return data; all its processes are gone afterwards.

    Raises:
        OSError: no process could be started.
    """
    begun = time.monotonic()
    with ExitStack() as stack:
        # The other levels have a folder of their own in memory.
        folder = stack.enter_context(_folder()) if level == "rlimits" else "/"
        given = stack.enter_context(_job_file(job, limits, level))
        (reports, report_end), (info, info_end), (mapped_end, mapped) = (os.pipe() for _ in range(3))
        for pipe in (reports, info, mapped):
            stack.callback(os.close, pipe)
        ends = (report_end, info_end, mapped_end)
        try:
            process = subprocess.Popen(
                _command(level, ends, limits),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=ends,
                env=ENVIRONMENT,
                cwd=folder,
                start_new_session=True,
                bufsize=0,
            )
        finally:
            for pipe in ends:
                os.close(pipe)
        assert process.stdout is not None
        try:
            with process.stdout:
                reading = _Reading(process.stdout.fileno(), reports, info, mapped, limits)
                end = reading.to_the_end()
            status = _wait(process, reading.deadline) if end == "exit" else None
        finally:
            _kill(process, level)
    told = bytes(reading.data[reports])
    return Execution(
        started=told[:1] == b"R",
        compiled={b"C": True, b"E": False}.get(told[1:2]),
        end="time" if end == "exit" and status is None else end,
        status=128 + signal.SIGKILL if status is None else status,
        output=bytes(reading.data[reading.output]),
        message=told[2 if told[:1] == b"R" else 1 :].decode(errors="replace"),
        seconds=time.monotonic() - begun,
        ran=reading.ran(),
    )


class _Reading:
    """Reads output and report until both are closed or a limit is passed.

    bubblewrap writes the process's id to `info`, and then the users of its namespace are named.
    """

    def __init__(self, output: int, reports: int, info: int, mapped: int, limits: SandboxLimits) -> None:
        self.output, self.reports, self.info, self.mapped, self.limits = output, reports, info, mapped, limits
        self.data = {output: bytearray(), reports: bytearray(), info: bytearray()}
        self.begun: float | None = None  # when the walls stood
        self.deadline = time.monotonic() + SET_UP_SECONDS  # a new one then

    def ran(self) -> float:
        """Seconds since the walls stand."""
        return 0.0 if self.begun is None else time.monotonic() - self.begun

    def to_the_end(self) -> Literal["exit", "time", "output"]:
        """How it ended, as in `Execution`; "exit" if both are closed, though the process may still be there."""
        most = {self.output: self.limits.output_bytes, self.reports: MESSAGE, self.info: MESSAGE}
        with selectors.DefaultSelector() as selector:
            for pipe in most:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                left = self.deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    return "time"
                for key, _ in ready:
                    chunk = os.read(key.fd, CHUNK)
                    self._add(key.fd, chunk)
                    if not chunk:
                        selector.unregister(key.fd)
                    elif len(self.data[key.fd]) > most[key.fd]:
                        return "output"
                    elif len(chunk) < SMALL:
                        time.sleep(0.001)  # a flood of single bytes costs this process little
        return "exit"

    def _add(self, pipe: int, chunk: bytes) -> None:
        if pipe == self.reports and chunk and not self.data[pipe]:
            self.begun = time.monotonic()
            self.deadline = self.begun + self.limits.seconds
        if pipe == self.info and chunk and not self.data[pipe]:
            _name_users(chunk, self.mapped)
        self.data[pipe] += chunk


@contextmanager
def _folder() -> Iterator[str]:
    """A folder that is gone afterwards, however deep what is in it lies; nothing mounted there is gone with it."""
    folder = tempfile.mkdtemp(prefix="program-")
    try:
        yield folder
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--one-file-system", folder])


def _job_file(job: SandboxJob, limits: SandboxLimits, level: Level) -> IO[bytes]:
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


def _name_users(info: bytes, mapped: int) -> None:
    """Names the users of a new namespace: ours and, where we may give one away, the program's own. Raises OSError.

    `info` begins with the number of the process that has the namespace and waits for something on `mapped`.
    """
    process, ours = Path("/proc", re.findall(r"\d+", info.decode())[0]), f"{OURS} {os.geteuid()} 1"
    (process / "setgroups").write_text("deny")
    (process / "gid_map").write_text(f"{OURS} {os.getegid()} 1")
    try:
        (process / "uid_map").write_text(f"{ours}\n{PROGRAM} {PROGRAM} 1")
    except OSError:
        (process / "uid_map").write_text(ours)
    os.write(mapped, b"go")


def _command(level: Level, ends: tuple[int, int, int], limits: SandboxLimits) -> list[str]:
    python = os.path.realpath(sys.executable)
    code = START.format(here=str(HERE), level=level, ends=ends)
    command = [python, "-S", "-s", "-B", "-P", "-X", "utf8", "-c", code]
    return [*_bubblewrap(python, limits, ends), *command] if level == "bubblewrap" else command


def _bubblewrap(python: str, limits: SandboxLimits, ends: tuple[int, int, int]) -> list[str]:
    walls = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL", "--as-pid-1"]
    if os.geteuid() == 0:  # else bubblewrap names the user, whose threads the kernel limits
        walls += f"--cap-add CAP_SETUID --cap-add CAP_CHOWN --info-fd {ends[1]} --userns-block-fd {ends[2]}".split()
        for parent in [up for path in (*interpreter_folders(), *DEVICES) for up in reversed(Path(path).parents)]:
            walls += ["--dir", str(parent)]  # which that user may pass through
    for path in interpreter_folders():
        walls += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    for path in (python, str(HERE / "inside")):
        walls += ["--ro-bind", path, path]
    for path in package_folders():
        walls += ["--tmpfs", path, "--remount-ro", path]
    for path in DEVICES:
        walls += ["--dev-bind", path, path]
    walls += ["--hostname", "sandbox", "--size", str(limits.file_bytes), "--tmpfs", WORK, "--chdir", WORK]
    return [*walls, "--remount-ro", "/"]


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Exit status; None if the time is up before."""
    try:
        status = process.wait(max(0.05, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return 128 - status if status < 0 else status


def _kill(process: subprocess.Popen[bytes], level: Level) -> None:
    """Ends all processes of a run and waits for them."""
    if process.poll() is None and level != "rlimits":
        for child in _children(process.pid):  # the outer process waits for the inner one and ends as it does
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
    """What Python needs of the file system: its standard library and shared libraries, its own and the system's."""
    system = [path for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib") if os.path.exists(path)]
    base = {"platbase": sys.base_exec_prefix}
    own = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    libraries = glob(os.path.join(sys.base_prefix, "lib", "*.so*"))  # of an interpreter that brings its own
    places = [os.path.realpath(os.path.dirname(libraries[0])) if libraries else "", *map(os.path.realpath, own)]
    found = system
    for path in filter(None, places):
        found = found if any(Path(path).is_relative_to(place) for place in found) else [*found, path]
    return found


@cache
def package_folders() -> list[str]:
    """Folders of installed packages below `interpreter_folders`, which programs do not see."""
    names = ("site-packages", "dist-packages")
    places = [p for folder in interpreter_folders() for depth in ("", "python3*/") for p in glob(f"{folder}/{depth}")]
    found = {os.path.realpath(os.path.join(place, name)) for place in places for name in names}
    return sorted(path for path in found if os.path.isdir(path))
