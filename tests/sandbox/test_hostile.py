# SPDX-License-Identifier: Apache-2.0
"""Programs that try to pass a test without solving it, to read what is not theirs, to leave something or to harm.

They stand in hostile.txt. The one test of each expects a secret as its output, which stands in the environment and in
a file of the parent's and is served on loopback, on a named and on an abstract socket: a program that passes has found
a hole. Words in capitals are replaced: SECRET_FILE, PORT, SOCKET, ABSTRACT, PARENT (its process id), COOKIE (in the
name of whatever is left behind), TEMP and HOME (folders). The names of functions, f(), begin with "call".
"""

import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dschat.scoring.programs import Limits, run_tests
from dschat.scoring.programs.levels import weakness

pytestmark = pytest.mark.xdist_group("sandbox")

LIMITS = Limits(seconds=1, memory=2**29)
# What `Limits` cannot know of: starting, killing, and a machine on which much else runs.
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
    places = [
        words["TEMP"],
        words["HOME"],
        "/var/tmp",
        "/dev/shm",
        "/run",
        "/",
        os.getcwd(),
        str(Path(os.__file__).parent),
    ]
    found = [path for place in map(Path, places) for path in place.glob(f"*{words['COOKIE']}*")]
    return found + list((Path(os.__file__).parent / "__pycache__").glob(f"*{words['COOKIE']}*"))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("level", ["namespaces", "bubblewrap"])
def test_a_hostile_program_gets_nothing(level, name, secret) -> None:
    if weak := weakness(level):
        pytest.skip(f"{level}: {weak}")
    source, words = PROGRAMS[name], {word: text for word, text in secret.items() if word}
    for word, text in words.items():
        source = source.replace(word, text)
    tests: dict[str, object] = {"inputs": [""], "outputs": [secret[""]]}
    if name.startswith("call"):
        tests = {"fn_name": "f", "inputs": [[]], "outputs": [secret[""]]}
    limits, clock, host, began = (
        [resource.getrlimit(kind) for kind in KINDS],
        time.time(),
        os.uname(),
        time.monotonic(),
    )
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    outcome = run_tests(source, tests, LIMITS, level)
    seconds = time.monotonic() - began
    assert outcome.status in ("wrong", "runtime_error", "timeout", "compile_error"), outcome
    assert seconds < LIMITS.seconds + SLACK
    assert abs(time.time() - clock - seconds) < 1
    assert [resource.getrlimit(kind) for kind in KINDS] == limits
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority and os.uname() == host
    assert not own_processes()
    assert not left_files(words)


def test_the_number_of_hostile_programs(record_property) -> None:
    record_property("hostile programs", len(PROGRAMS))
    print(f"{len(PROGRAMS)} hostile programs")
    assert len(PROGRAMS) >= 60


@pytest.mark.parametrize("level", ["namespaces", "bubblewrap", "rlimits"])
def test_the_secret_is_what_a_right_program_prints(level, secret) -> None:
    if weak := weakness(level):
        pytest.skip(f"{level}: {weak}")
    tests = {"inputs": [secret[""]], "outputs": [secret[""]]}
    assert run_tests("print(input())", tests, LIMITS, level).status == "passed"


@pytest.mark.parametrize("name", ["environment", "file of the user", "network", "socket in the file system"])
def test_the_secret_is_within_reach_of_a_program_without_walls(name, secret) -> None:
    source = PROGRAMS[name]
    for word in filter(None, secret):
        source = source.replace(word, secret[word])
    command = [sys.executable, "-c", source]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == secret[""]
