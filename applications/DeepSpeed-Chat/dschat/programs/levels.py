# SPDX-License-Identifier: Apache-2.0
"""Finds the strongest sandbox level of this machine: each level is probed once by a program that looks for holes."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from dataclasses import dataclass
from functools import cache

from dschat.base.errors import UserError
from dschat.programs.sandbox import LEVELS, Level, SandboxJob, SandboxLimits, bubblewrap, execute

REMEDIES = {
    "bubblewrap": "install it (apt-get install bubblewrap) and allow unprivileged user namespaces",
    "namespaces": "allow unprivileged user namespaces (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0;"
    " docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined in a container)",
    "rlimits": "run on Linux",
}
THREADS = "more threads than its limit (docs/programs.md says what helps)"  # a hole that does not rule out a level
# Tries what no program may do; prints a list of what succeeded.
PROBE = """
import json, os, socket, sys, threading
port, secret, limit, no_limit = json.loads(input())
found = []
def look(name, attempt):
    try:
        if attempt():
            found.append(name)
    except BaseException:
        pass
def network():
    with socket.create_connection(("127.0.0.1", port), 1):
        return True
def starts_processes():
    if os.fork() == 0:
        os._exit(0)
    return True
def threads():
    threading.stack_size(2**15)
    end = threading.Event()
    try:
        for _ in range(limit): threading.Thread(target=end.wait).start()
    finally: end.set()
    return True
look("the network", network)
look("the user's files", lambda: open(secret).read())
look("the disk", lambda: open("file", "w"))
look("other processes", lambda: os.listdir("/proc"))
look("new processes", starts_processes)
look(no_limit, threads)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class ProbeResult:
    """What the probe of a level found."""

    failure: str = ""  # why the level cannot be set up; empty if it can
    holes: tuple[str, ...] = ()  # what a program inside can use nevertheless


def strongest_level(least: Level) -> Level:
    """The strongest level that works on this machine.

    Raises:
        UserError: no level as strong as `least` works; the message says what to install or to allow.
    """
    if sys.platform != "linux":
        raise UserError(f"--sandbox_level {least}: programs run on Linux only, not on {sys.platform}.")
    acceptable_levels = LEVELS[: LEVELS.index(least) + 1]
    for level in acceptable_levels:
        if not weakness(level):
            return level
    reasons = [f"{level}: {weakness(level)}. Remedy: {REMEDIES[level]}" for level in reversed(acceptable_levels)]
    message = f"--sandbox_level {least}: this machine does not support such isolation ({'; '.join(reasons)})."
    if least != "rlimits":
        message += " Or accept protection from accidents alone, with programs that you trust: --sandbox_level rlimits."
    raise UserError(message)


def weakness(level: Level) -> str:
    """Why a level does not work on this machine; empty if it does. The weakest level may have holes."""
    result = probe(level)
    holes = [hole for hole in result.holes if hole != THREADS]
    if result.failure or level == "rlimits" or not holes:
        return result.failure
    return f"a program inside can use {' and '.join(holes)}"


@cache
def probe(level: Level) -> ProbeResult:
    """Runs a program at a level that looks for holes; once per process."""
    if sys.platform != "linux":
        return ProbeResult(f"{sys.platform} has none")
    if level == "bubblewrap" and bubblewrap() is None:
        return ProbeResult("there is no program bwrap")
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile(mode="w") as secret:
        secret.write("secret")
        secret.flush()
        job = SandboxJob(PROBE, json.dumps([server.getsockname()[1], secret.name, SandboxLimits().threads, THREADS]))
        try:
            execution = execute(job, SandboxLimits(seconds=60.0), level)  # also on a busy machine
        except OSError as error:
            return ProbeResult(f"it cannot be started: {error}")
    if not execution.started:
        return ProbeResult(f"it cannot be set up: {execution.message or 'no message'}")
    if execution.status != 0:
        return ProbeResult(f"a test program ended with status {execution.status}: {execution.message}")
    return ProbeResult(holes=tuple(json.loads(execution.output)))
