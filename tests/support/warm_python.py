# SPDX-License-Identifier: Apache-2.0
"""Programs `python` and `dschat` whose commands run in forks of a process that has imported everything.

A process takes about ten seconds to import torch, transformers and DeepSpeed. A fork is a process of its own, with its
own arguments, variables, folder and files; only the imports are shared. A new Python is started for options of the
interpreter other than `-u`, for programs on the command line, for `-m` of other packages, and under other values of
variables that libraries read when they are imported. A fork joins the network, the hostname and the mounts of the
program that asks for it, which may be those of another machine (`support/two_nodes.py`).
"""

import ctypes
import json
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

READ_ON_IMPORT = (
    *("CUDA_", "DS_", "HF_", "HOME", "HUGGINGFACE_", "LANG", "LC_", "LD_", "MKL_", "MPL", "OMP_", "PYTHON", "TORCH"),
    *("TRANSFORMERS_", "WANDB_", "XDG_"),
)
READ_BY_PYTHON = ("PYTHONPATH", "PYTHONUNBUFFERED")  # of these, a fork does what a new Python does
NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}  # in /proc, and as flags of setns
HAS_GPU = Path("/dev/nvidiactl").exists()
PROGRAM_OF_CHILDREN = "WARM_PYTHON"  # a variable: the path of the program that `sys.executable` is to name
LENGTH_BYTES = 4  # of a request, before its JSON
# The second line is a command for sh and a string for Python: after `#!`, a path could not hold a space.
PROGRAM = """#!/bin/sh
'''exec' "{python}" -ISB "$0" "$@"
' '''
import json, os, signal, socket, sys, time

words = {first_words} + sys.argv[1:]
forwarded = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def start_new():
    os.execv({python!r}, [{python!r}, *words])


command = words[1:] if words[:1] == ["-u"] else words
is_package = command[:1] == ["-m"] and command[1].split(".")[0] in ("dschat", "deepspeed")
if not command or command[0].startswith("-") and not is_package:
    start_new()
connection = socket.socket(socket.AF_UNIX)
for _ in range(1200):
    try:
        connection.connect({address!r})
        break
    except OSError:  # the server is still importing
        time.sleep(0.1)
request = dict(words=command, folder=os.getcwd(), variables=dict(os.environ), process=os.getpid())
request = json.dumps(request).encode()
socket.send_fds(connection, [len(request).to_bytes({length_bytes}, "big")], [0, 1, 2])
connection.sendall(request)
answers = connection.makefile()
process = int(answers.readline())
if process == 0:
    start_new()
for number in forwarded:
    signal.signal(number, lambda number, frame: os.kill(process, number))
status = int(answers.readline())
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
sys.exit(os.WEXITSTATUS(status))
"""


def write_programs(folder: Path, address: str) -> None:
    """Writes `python`, `python3` and `dschat`, which ask the server at `address`."""
    console_script = Path(sys.executable).parent / "dschat"
    first_words = {"python": [], "python3": [], "dschat": [str(console_script)]}
    for name, words in first_words.items():
        program = folder / name
        text = PROGRAM.format(python=sys.executable, first_words=words, address=address, length_bytes=LENGTH_BYTES)
        program.write_text(text)
        program.chmod(0o755)


def read_on_import(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that libraries may have read when they were imported."""
    values = {"DS_ACCELERATOR": "cpu"}  # as `dschat.engine.process_group` sets it without a GPU
    for name, value in variables.items():
        is_read = name.startswith(READ_ON_IMPORT) and name not in READ_BY_PYTHON
        if is_read and (HAS_GPU or not name.startswith("CUDA_")):
            values[name] = value
    return values


def serve(address: str, variables: dict[str, str]) -> None:
    """Forks for each request, until the process that started this one has ended; removes the programs then.

    Args:
        address: path of the socket.
        variables: with which everything was imported.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        server.settimeout(1)
        while os.getppid() == parent:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _answer(connection, read_on_import(variables))
            connection.close()
    shutil.rmtree(Path(address).parent, ignore_errors=True)


def _answer(connection: socket.socket, variables: dict[str, str]) -> None:
    """Runs a request in a fork and sends its process id and its status; the id 0 asks for a new Python."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
    request = json.loads(_received(connection, int.from_bytes(head, "big")))
    if read_on_import(request["variables"]) != variables:
        connection.sendall(b"0\n")
        os._exit(0)
    process = os.fork()
    if process == 0:
        connection.close()
        return _become(request, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    connection.sendall(f"{process}\n".encode())
    ended = os.pidfd_open(process)
    readable, _, _ = select.select([connection.fileno(), ended], [], [])
    is_killed = connection.fileno() in readable  # the program that asked
    if is_killed:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if not is_killed:
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _received(connection: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        part = connection.recv(length - len(content))
        if not part:
            raise EOFError("the program that asked has ended")
        content += part
    return content


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """This process becomes the one that was asked for; how it ends is left to `multiprocessing`."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)
    is_unbuffered = bool(request["variables"].get("PYTHONUNBUFFERED"))
    sys.stdout = open(1, "w", buffering=1 if is_unbuffered else -1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    _join_namespaces(request["process"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    vars(multiprocessing.current_process())["_config"]["daemon"] = False  # it may have children
    sys.executable = os.environ.get(PROGRAM_OF_CHILDREN, sys.executable)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    words = request["words"]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, request["folder"])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _join_namespaces(process: int) -> None:
    """This process enters the namespaces of another one that are not its own."""
    different = 0
    for name, flag in NAMESPACES.items():
        if os.readlink(f"/proc/{process}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            different |= flag
    if different and ctypes.CDLL(None, use_errno=True).setns(os.pidfd_open(process), different) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def new_address() -> str:
    """A path for a socket, in a folder of its own; a path may have 107 characters."""
    return str(Path(tempfile.mkdtemp(prefix="warm-python-")) / "socket")
