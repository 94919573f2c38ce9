# SPDX-License-Identifier: Apache-2.0
"""What processes on other machines are told by ssh: their words and their environment.

DeepSpeed's launcher joins words and variables to one command line for a shell on each machine, without quotes where
it would need them, and logs it. So a word that a shell could read otherwise is packed into letters that every shell
leaves alone. Variables that are secret, or that a shell could read otherwise, never are on a command line: they go
through ssh's standard input into a file on each machine that only its owner can read. The file is removed when the run
ends.
"""

import base64
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dschat.errors import UserError

VARIABLES = "MA_RLHF_VARIABLES"  # names the file on a machine that holds variables
PACKED = "packed:"  # a word that begins so holds another one
PLAIN = re.compile(r"[\w+=:,./-]+", re.ASCII)  # what every shell, and pdsh, leaves alone
MISREAD = re.compile(r'["$`\\%\n]')  # what a shell reads inside double quotes, and pdsh everywhere
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|PROXY|COOKIE", re.IGNORECASE)
# Variables that a run or its libraries read, beside those that DeepSpeed's launcher passes on by itself.
CARRIED = re.compile(
    r"(HF|HUGGING_FACE|HUGGINGFACE|TRANSFORMERS|DATASETS|WANDB|OPENAI|VLLM)_\w+|MA_RLHF_(DATA|CACHE|DATE)|PROJ_PATH|REWARD_API_KEY"
    r"|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|TENSORBOARD_\w+|(HTTPS?|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)"
    r"|REQUESTS_CA_BUNDLE",
    re.IGNORECASE,
)
PASSED_ON = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH")  # beginnings, by DeepSpeed's launcher
BEFORE_PYTHON = ("PYTHON", "LD_LIBRARY", "PATH")  # of them, those that Python's start depends on
SSH_TIMEOUT = 120  # seconds
SSH_FAILED = 255  # status of ssh itself: no connection, or ended by a signal
PROGRAMS = {"pdsh": "pdsh", "ssh": "openssh-client"}  # that the launcher starts, and their Debian packages


@dataclass(frozen=True)
class RemoteEnvironment:
    """Variables of processes on other machines, by how they get there."""

    exported: dict[str, str] = field(default_factory=dict)  # on the command line
    delivered: dict[str, str] = field(default_factory=dict)  # in a file
    launcher: dict[str, str] = field(default_factory=dict)  # the launcher's own environment


def pack(words: Sequence[str]) -> list[str]:
    """Words for the command line of another machine; `receive` unpacks them there."""
    packed: list[str] = []
    for word in words:
        if PLAIN.fullmatch(word) and not word.startswith(PACKED):
            packed.append(word)
        else:
            letters = base64.urlsafe_b64encode(word.encode("utf-8", "surrogateescape")).decode("ascii")
            packed.append(f"{PACKED}{letters}")
    return packed


def receive(words: Sequence[str]) -> list[str]:
    """Unpack words and read variables, where a launcher on another machine has sent them; else the words as they are.

    Raises:
        UserError: the file of variables is not there.
    """
    name = os.environ.get(VARIABLES)
    if name is None:
        return list(words)
    if name:
        try:
            os.environ.update(json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(f"{name}, the variables of this run on this machine, cannot be read: {error}.") from error
    return [_unpack(word) for word in words]


def _unpack(word: str) -> str:
    if not word.startswith(PACKED):
        return word
    return base64.urlsafe_b64decode(word.removeprefix(PACKED)).decode("utf-8", "surrogateescape")


def check_paths() -> None:
    """Raises UserError where DeepSpeed's launcher cannot name this folder or this Python to other machines."""
    for what, path in (("the current folder", os.path.abspath(".")), ("Python", sys.executable)):
        if not re.fullmatch(r"[\w+=:,./@-]+", path):
            raise UserError(
                f"--hostfile: {what}, {path}, has characters that the shell of another machine would read otherwise;"
                " use a path of letters, digits and _ . -"
            )


def check_programs() -> None:
    """Raises UserError where a program is missing by which DeepSpeed's launcher reaches other machines."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise UserError(
                f"--hostfile names several machines, which are reached by {program}, which is not installed: install"
                f" it (Debian package {package}), or start the command on each machine with --num_nodes, --node_rank"
                " and --master_addr."
            )


def split_variables(environ: Mapping[str, str], further: Mapping[str, str]) -> RemoteEnvironment:
    """Decide how variables get to other machines.

    Args:
        environ: this process's.
        further: variables of DeepSpeed's own file.

    Raises:
        UserError: a variable that Python's start depends on has characters that a shell would read otherwise.
    """
    carried = {name: value for name, value in environ.items() if CARRIED.fullmatch(name)} | dict(further)
    plain = {name: value for name, value in carried.items() if not value or PLAIN.fullmatch(value)}
    exported = {name: value for name, value in plain.items() if not SECRET.search(name)}
    delivered = {name: value for name, value in carried.items() if name not in exported}
    launcher = dict(environ)
    for name, value in environ.items():
        misread = MISREAD.search(value) is not None
        if not name.startswith(PASSED_ON) or not (misread or SECRET.search(name)):
            continue
        if misread and name.startswith(BEFORE_PYTHON):
            raise UserError(
                f"{name}: the shell of another machine would read its value otherwise; remove $ and quotes."
            )
        delivered.setdefault(name, value)
        del launcher[name]
    return RemoteEnvironment(exported, delivered, launcher)


@contextmanager
def delivered(variables: Mapping[str, str], hosts: Sequence[str]) -> Iterator[str]:
    """Inside, a file on each machine holds variables; yields its path, which is empty where there are none.

    The file is removed everywhere, also where it could not be written on each machine. A signal whose handler returns
    does not interrupt that.

    Raises:
        UserError: a machine cannot be reached, or the file cannot be written there.
    """
    if not variables:
        yield ""
        return
    path = f"/tmp/ma-rlhf-{secrets.token_hex(16)}"
    content = json.dumps(dict(variables)).encode()
    with ThreadPoolExecutor(16) as pool:
        try:
            # All of them are waited for: a file written after its removal would stay.
            failures = [failure for failure in pool.map(partial(_write_on, path, content), hosts) if failure]
            if failures:
                raise UserError(failures[0])
            yield path
        finally:
            list(pool.map(partial(_remove_on, path), hosts))


def _write_on(path: str, content: bytes, host: str) -> str:
    """Write a file that only its owner can read on a machine; one that another name of it has got is left.

    Returns:
        Why it could not be written; empty where it is written.
    """
    done = _ssh(host, f"sh -c 'umask 077; set -C; [ -O {path} ] || cat > {path}'", content)
    if not done.returncode:
        return ""
    said = " ".join(done.stderr.decode(errors="replace").split())
    return f"--hostfile: variables could not be sent to {host} by ssh: {said or 'it says nothing'}."


def _remove_on(path: str, host: str) -> None:
    """Remove the file on a machine, or warn. Tries twice where ssh itself fails: Ctrl-C ends ssh, too."""
    status = SSH_FAILED
    for _ in range(2):
        if status < 0 or status == SSH_FAILED:
            status = _ssh(host, f"rm -f {path}", b"").returncode
    if status:
        print(f"warning: {path} on {host} could not be removed; it holds this run's variables", file=sys.stderr)


def _ssh(host: str, command: str, content: bytes) -> "subprocess.CompletedProcess[bytes]":
    words = ["ssh", "-o", "PasswordAuthentication=no", host, command]
    try:
        return subprocess.run(words, input=content, capture_output=True, timeout=SSH_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, b"", str(error).replace(command, "…").encode())
