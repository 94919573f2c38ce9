# SPDX-License-Identifier: Apache-2.0
"""Which walls this machine can put up: each level is tried out once by a program that looks for holes."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tempfile
from functools import cache

from dschat.base.errors import UserError
from dschat.scoring.programs.sandbox import LEVELS, Level, SandboxJob, SandboxLimits, execute

REMEDIES = {
    "bubblewrap": "install it (apt-get install bubblewrap) and allow unprivileged user namespaces",
    "namespaces": "allow unprivileged user namespaces (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0;"
    " docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined in a container)",
    "rlimits": "run on Linux",
}
THREADS = "more threads than its limit (docs/programs.md says what helps)"  # what a sandbox that is used lacks
# Looks for what no program may find; prints what it found.
SEARCH = """
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
look("other processes", lambda: os.listdir("/proc"))
look("new processes", starts_processes)
look(no_limit, threads)
print(json.dumps(found))
"""


def strongest_level(least: Level) -> Level:
    """The strongest walls that stand on this machine.

    Raises:
        UserError: only weaker ones stand; says what to install or to allow.
    """
    wanted = LEVELS[: LEVELS.index(least) + 1]
    for level in wanted:
        if not weakness(level):
            return level
    reasons = "; ".join(f"{level}: {weakness(level)}. Remedy: {REMEDIES[level]}" for level in reversed(wanted))
    raise UserError(
        f"--sandbox_level {least}: this machine cannot shut a program in so well ({reasons}). Or accept protection"
        " from accidents alone, with programs that you trust: --sandbox_level rlimits."
    )


def weakness(level: Level) -> str:
    """Why a level is not one on this machine; empty if it is. The weakest one may have holes."""
    reason, found = try_out(level)
    holes = [hole for hole in found if hole != THREADS]
    if reason or level == "rlimits" or not holes:
        return reason
    return f"a program inside reaches {' and '.join(holes)}"


@cache
def try_out(level: Level) -> tuple[str, tuple[str, ...]]:
    """Why the walls of a level cannot be put up, empty if they can; and what a program inside reaches all the same."""
    if sys.platform != "linux":
        return f"{sys.platform} has none", ()
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "there is no program bwrap", ()
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile(mode="w") as secret:
        secret.write("secret")
        secret.flush()
        job = SandboxJob(SEARCH, json.dumps([server.getsockname()[1], secret.name, SandboxLimits().threads, THREADS]))
        try:
            execution = execute(job, SandboxLimits(seconds=60.0), level)  # on a machine that is busy, too
        except OSError as error:
            return f"it cannot be started: {error}", ()
    if not execution.started:
        return f"it cannot be put up: {execution.message or 'it says nothing'}", ()
    if execution.status != 0:
        return f"a test program ended with status {execution.status}: {execution.message}", ()
    return "", tuple(json.loads(execution.output))
