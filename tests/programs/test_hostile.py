# SPDX-License-Identifier: Apache-2.0
"""Programs that try to pass a test without solving it, to read what is not theirs, to leave something or to harm.

They stand in hostile.txt. The one test of each expects a secret as its output, which stands in the environment and in
a file of the parent's and is served on loopback, on a named and on an abstract socket: a program that passes has found
a hole. Words in capitals are replaced: SECRET_FILE, PORT, SOCKET, ABSTRACT, PARENT (its process id), COOKIE (in the
name of whatever is left behind), TEMP and HOME (folders). The names of functions, f(), begin with "call".
"""

import os
import re
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dschat.programs import SandboxLimits, run_tests
from dschat.programs.inside.confine import SYSTEM_CALLS
from dschat.programs.levels import ProbeResult, probe, weakness
from dschat.programs.sandbox import Level, SandboxJob, execute

pytestmark = pytest.mark.xdist_group("sandbox")

KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
LIMITS, PATIENT = (SandboxLimits(seconds=seconds, memory=2**29) for seconds in (0.5, 60.0))
# What `SandboxLimits` cannot know of: starting, killing, and a machine on which much else runs.
SLACK = 6.0
KINDS = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)


def read_programs() -> dict[str, str]:
    """Name → source."""
    text = (Path(__file__).parent / "hostile.txt").read_text(encoding="utf-8")
    parts = text.partition("\n=== ")[2].split("\n=== ")
    programs = {name: source.partition("\n##### ")[0] for name, _, source in (part.partition("\n") for part in parts)}
    return programs | {
        "NUL in the source": "print(1)\0",
        "no text in the source": "print('\ud800')",
        "deep source": "x = " + "(" * 100_000 + ")" * 100_000,
        "deep source of operators": "x = " + "-" * 1_000_000 + "1",
    }


PROGRAMS = read_programs()


@pytest.fixture
def level(request) -> Level:
    if weak := weakness(request.param):
        pytest.skip(f"{request.param}: {weak}")
    return request.param


both_levels = pytest.mark.parametrize("level", ["namespaces", "bubblewrap"], indirect=True)


@pytest.fixture(scope="module")
def secret(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A secret, planted wherever a program might look; the words that lead there."""
    value, cookie = f"expected-{secrets.token_hex(16)}", f"left-{secrets.token_hex(8)}"
    home = tmp_path_factory.mktemp("home")
    (home / "key").write_text(value)
    os.chmod(home / "key", 0o644)
    named = tempfile.mkdtemp(prefix="s-")  # a socket's path is short
    servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    servers[1].bind(f"{named}/s")
    servers[2].bind(f"\0{cookie}")
    for server in servers:
        server.listen()
        threading.Thread(target=serve, args=(server, value), daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED", value)
        patch.setenv("HOME", str(home))
        yield {
            "SECRET_FILE": str(home / "key"),
            "PORT": str(servers[0].getsockname()[1]),
            "SOCKET": f"{named}/s",
            "ABSTRACT": cookie,
            "PARENT": str(os.getpid()),
            "COOKIE": cookie,
            "TEMP": tempfile.gettempdir(),
            "HOME": str(home),
            "": value,
        }
    for server in servers:
        server.close()
    shutil.rmtree(named)


def serve(server: socket.socket, value: str) -> None:
    """Gives the secret to whoever asks."""
    while True:
        try:
            connection = server.accept()[0]
        except OSError:
            return
        with connection:
            connection.sendall(value.encode())


def own_processes() -> list[str]:
    """Command lines of sandboxes that this process started or that nobody waits for."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if "inside.main" in command and parent in (1, os.getpid()):
            found.append(command)
    return found


def left_files(words: dict[str, str]) -> list[Path]:
    """Whatever has the cookie in its name, where a program could have written it."""
    library = Path(os.__file__).parent
    places = [words["TEMP"], words["HOME"], "/var/tmp", "/dev/shm", "/run", "/", os.getcwd()]
    places += [library, library / "__pycache__"]
    return [path for place in map(Path, places) for path in place.glob(f"*{words['COOKIE']}*")]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("level", ["namespaces", pytest.param("bubblewrap", marks=pytest.mark.slow)], indirect=True)
def test_a_hostile_program_gets_nothing(level, name, secret) -> None:
    source, words = PROGRAMS[name], {word: text for word, text in secret.items() if word}
    for word, text in words.items():
        source = source.replace(word, text)
    tests: dict[str, object] = {"inputs": [""], "outputs": [secret[""]]}
    if name.startswith("call"):
        tests = {"fn_name": "f", "inputs": [[]], "outputs": [secret[""]]}
    limits, priority = [resource.getrlimit(kind) for kind in KINDS], os.getpriority(os.PRIO_PROCESS, 0)
    clock, host, began = time.time(), os.uname(), time.monotonic()
    outcome = run_tests(source, tests, LIMITS, level)
    seconds = time.monotonic() - began
    assert outcome.status in ("wrong", "runtime_error", "timeout", "compile_error"), outcome
    assert seconds < LIMITS.seconds + SLACK
    assert abs(time.time() - clock - seconds) < 1
    assert [resource.getrlimit(kind) for kind in KINDS] == limits
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority and os.uname() == host
    assert not own_processes()
    assert not left_files(words)


@both_levels
def test_nothing_of_the_machine_is_seen_or_left(level, secret) -> None:
    """What the programs above could not tell: their one test cannot be passed in any case."""
    source = """
import glob, os, sys
print(os.uname().nodename, sorted(os.environ), os.getcwd(), os.listdir('.'), os.getpid() < 5)
print([path for path in glob.glob(sys.prefix + '/lib/python3*/*-packages/*') + glob.glob('/usr/lib/python3/*/*')])
for attempt in (lambda: os.chmod('/dev/null', 0o666), lambda: os.utime('/dev/null'), lambda: os.kill(1, 0)):
    try: print(attempt(), 'done')
    except PermissionError: print('refused')
print('x', file=open('/dev/null', 'w'))
"""
    printed = "sandbox [] /program [] True\n[]\nrefused\nrefused\nrefused\n"
    before = os.stat("/dev/null")
    outcome = run_tests(source, {"inputs": [""], "outputs": [printed]}, PATIENT, level)
    assert outcome.status == "passed", outcome
    assert os.stat("/dev/null").st_ctime == before.st_ctime


# Ways to make, change, empty and lock files; prints those that succeed. Locks of the interpreter's files would hold in
# every sandbox and on the machine.
WRITES = """
import fcntl, os, struct, tempfile
def attempt(name, function, *arguments):
    try: function(*arguments)
    except OSError: pass
    else: print(name)
for folder in ('.', '/', '/tmp', '/dev', '/dev/shm', '/proc', '/var/tmp', os.path.dirname(os.__file__)):
    attempt('open ' + folder, open, folder + '/COOKIE', 'w')
    attempt('mkdir ' + folder, os.mkdir, folder + '/COOKIE-folder')
    attempt('symlink ' + folder, os.symlink, 'x', folder + '/COOKIE-link')
    attempt('mkfifo ' + folder, os.mkfifo, folder + '/COOKIE-pipe')
    attempt('unnamed ' + folder, os.open, folder, os.O_TMPFILE | os.O_RDWR)
attempt('temporary', tempfile.TemporaryFile)
attempt('in memory', os.memfd_create, 'x')
attempt('rename', os.rename, os.__file__, 'x')
attempt('truncate', os.truncate, os.__file__, 0)
lock = struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 1, 0)
for path in (os.__file__, '/dev/null', '.'):
    descriptor = os.open(path, os.O_RDONLY)
    attempt('flock ' + path, fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    attempt('lockf ' + path, fcntl.lockf, descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    attempt('lock of a description ' + path, fcntl.fcntl, descriptor, fcntl.F_OFD_SETLK, lock)
    attempt('lease ' + path, fcntl.fcntl, descriptor, 1024, fcntl.F_RDLCK)
    attempt('notice ' + path, fcntl.fcntl, descriptor, 1026, 1)
print('end')
"""


@pytest.mark.parametrize("level", ["namespaces", "bubblewrap", "rlimits"], indirect=True)
def test_a_program_makes_changes_and_locks_no_file(level, secret) -> None:
    """Files cost memory of the kernel, or room on the disk, that no limit of a process counts."""
    execution = execute(SandboxJob(WRITES.replace("COOKIE", secret["COOKIE"])), PATIENT, level)
    assert execution.output.decode().split("\n") == ["end", ""], execution
    assert not left_files(secret)


def test_without_landlock_no_byte_is_written(tmp_path) -> None:
    code = """
from dschat.programs.inside.confine import limit_resources
limit_resources(9.0, 2**33, 64, None)
with open("file", "wb", buffering=0) as file:
    try: file.write(b"x")
    except OSError as error: print(error.strerror)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "File too large\n", done
    assert (tmp_path / "file").stat().st_size == 0


# A process whose system calls alone are restricted asks for a signal to its parent when a pipe is readable.
ASKS_FOR_A_SIGNAL = """
import fcntl, os, signal
from dschat.programs.inside.confine import restrict_calls
read, write = os.pipe()
assert restrict_calls()
for command, value in ((fcntl.F_SETOWN, os.getppid()), (10, signal.SIGUSR1)):  # 10: F_SETSIG
    try: fcntl.fcntl(read, command, value)
    except PermissionError: print('refused')
fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)
os.write(write, b'x')
copy = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 0)
print(os.read(copy, 1))
"""


@pytest.mark.skipif(os.uname().machine not in SYSTEM_CALLS, reason="no filter of system calls for this machine")
def test_a_process_asks_for_no_signal_to_another() -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
    try:
        command = [sys.executable, "-c", ASKS_FOR_A_SIGNAL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done.stdout.split() == ["refused", "refused", "b'x'"], done.stderr
    assert signals == []


@both_levels
def test_what_is_hostile_costs_the_parent_little(level) -> None:
    """CPU seconds of this process, of programs that take all of theirs; a second each would be the machine's fault."""
    names = ("a flood of single bytes", "call: numbers that take long to read", "call: millions of lists")
    for name in names:
        tests: dict[str, object] = {"inputs": [""], "outputs": ["1"]}
        if name.startswith("call"):
            tests = {"fn_name": "f", "inputs": [[]], "outputs": [1]}
        began = time.process_time()
        run_tests(PROGRAMS[name], tests, LIMITS, level)
        assert time.process_time() - began < 0.7, name


# Prints how many processes, and threads beside them, there are at a time: of 500 forks, 500 threads by clone, which
# share one stack and cost no memory that a limit counts, and 500 of Python's.
MANY = """
import ctypes, os, signal, threading
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(2**16)
top = ctypes.c_void_p(ctypes.addressof(stack) + 2**15)
made = [0, 0, 0]
try:
    while made[0] < 500:
        if os.fork() == 0: signal.pause()
        made[0] += 1
except OSError: pass
while made[1] < 500 and libc.clone(libc.pause, top, 0x50f00, None) != -1:
    made[1] += 1
threading.stack_size(2**15)
end = threading.Event()
try:
    while made[2] < 500:
        threading.Thread(target=end.wait, daemon=True).start()
        made[2] += 1
except RuntimeError: pass
print(sum(made), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(KERNEL < (5, 14), reason="the kernel counts threads by user alone")
@both_levels
def test_a_sandbox_has_its_own_limit_of_threads_and_processes(level) -> None:
    execution = execute(SandboxJob(MANY), SandboxLimits(), level)
    assert execution.status == 0, execution
    assert 32 < int(execution.output) < 64
    assert probe(level) == ProbeResult()  # which looks for it, too


@both_levels
def test_killed_programs_are_waited_for(level) -> None:
    """No process of a sandbox that was ended is left to whoever adopts orphans."""
    code = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # this process adopts orphans, and does not look after them
from dschat.programs import SandboxLimits, run_tests
from dschat.programs.inside.confine import SYSTEM_CALLS
for _ in range(3):
    found = run_tests("while True: pass", {"inputs": [""], "outputs": ["1"]}, SandboxLimits(seconds=.3), "LEVEL")
    assert found.status == "timeout"
try: print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError: print("none")
"""
    done = subprocess.run([sys.executable, "-c", code.replace("LEVEL", level)], capture_output=True, text=True)
    assert done.stdout.strip() == "none", done


@pytest.mark.parametrize("name", ["environment", "file of the user", "network", "socket in the file system"])
def test_the_secret_is_within_reach_of_a_program_without_walls(name, secret) -> None:
    source = PROGRAMS[name]
    for word in filter(None, secret):
        source = source.replace(word, secret[word])
    command = [sys.executable, "-c", source]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == secret[""]
