# SPDX-License-Identifier: Apache-2.0
"""Environment variables for processes on other machines, which are started by ssh.

DeepSpeed's launcher joins words and variables into one command line for a shell on each machine, does not quote them
properly, and logs the line. The flags of a run and all variables go through ssh's standard input into a file on each
machine that only its owner can read, and that is removed when the run ends. On the command line are the subcommand and
the variables of this process that Python reads when it starts.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from dschat.base.errors import UserError
from dschat.base.secrets import SECRET_NAME
from dschat.ranks import Child, passing_on_signals, run_ranks

REMOTE_FILE_VARIABLE = "MA_RLHF_VARIABLES"  # path of the file of variables on each machine
MISREAD = re.compile(r'["$`\\%\n]')  # characters that a shell interprets inside double quotes, and pdsh everywhere
# Variables that a run or its libraries read, unless they are one machine's own.
CARRIED = re.compile(
    r"(HF|HUGGING_FACE|HUGGINGFACE|TRANSFORMERS|DATASETS|WANDB|TRACKIO|TENSORBOARD|OPENAI|VLLM)_\w+"
    r"|(GLOO|FI|TORCH|PYTORCH|TRITON)_\w+|CUDA_(?!VISIBLE_DEVICES)\w+"
    r"|MA_RLHF_(DATA|CACHE|DATE|GIVEN)|PROJ_PATH|(REWARD|JUDGE|USER)_API_KEY"
    r"|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|(HTTPS?|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE",
    re.IGNORECASE,
)
BEFORE_PYTHON = re.compile(r"PYTHON\w*|LD_LIBRARY_PATH|PATH")  # variables that Python reads when it starts
# Prefixes of variables that DeepSpeed's launcher passes on by itself.
PASSED_ON = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH")
SSH_TIMEOUT = 120  # seconds
SSH_FAILED = 255  # status of ssh itself: no connection, or ended by a signal
HOSTFILE_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[0-9]+)(\s.*)?")  # what DeepSpeed's launcher accepts
DS_ENV_FILE = "DS_ENV_FILE"  # name of DeepSpeed's file of variables for other machines
PROGRAMS = {"pdsh": "pdsh", "ssh": "openssh-client"}  # programs that the launcher needs, and their Debian packages


def read_hostfile(hostfile: str) -> dict[str, int]:
    """Slots of each machine in a hostfile of lines "name slots=8".

    Raises:
        UserError: the file cannot be read, or holds a line that DeepSpeed's launcher would refuse.
    """
    slots_of: dict[str, int] = {}
    for line in _read_lines(hostfile, f"--hostfile {hostfile}"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = HOSTFILE_LINE.fullmatch(line)
        if match is None or int(match["slots"]) < 1:
            host = line.split()[0]
            raise UserError(f'--hostfile {hostfile}: the line of {host} must be like "{host} slots=8".')
        host = match["host"]
        if host in slots_of:
            raise UserError(f"--hostfile {hostfile} names {host} twice: give each machine one line.")
        slots_of[host] = int(match["slots"])
    if not slots_of:
        raise UserError(f'--hostfile {hostfile} names no machine: give lines like "name slots=8".')
    return slots_of


def _read_lines(file: str | Path, source: str) -> list[str]:
    """The lines of a file. Raises UserError, which begins with `source`, if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not in UTF-8: save the file in that encoding.") from error
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error}.") from error


def run_by_ssh(
    options: Sequence[str],
    hosts: Sequence[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    scratch: Path,
) -> int:
    """Runs `python -m dschat …` in every rank of several machines, which DeepSpeed's launcher reaches by ssh.

    Args:
        options: options of the launcher.
        hosts: names of the machines.
        arguments: the words of the subcommand.
        environment: variables for the ranks.
        scratch: folder for the launcher's file of variables.

    Returns:
        The exit status, see `dschat.ranks.run_ranks`.

    Raises:
        UserError: a machine cannot be reached, or a program that reaches it is not installed.
    """
    check_paths()
    check_programs()
    delivered = remote_variables(environment, launcher_variables())
    with passing_on_signals(_send_to_launcher) as signals, remote_file(delivered, hosts) as path:
        if signals.last is not None:  # a signal came while the variables were sent
            return 128 + signals.last
        ds_env_file = scratch / "variables"
        ds_env_file.write_text(f"{REMOTE_FILE_VARIABLE}={path}\n", encoding="utf-8")
        # Ranks that the launcher starts on this machine read its environment instead of DeepSpeed's file.
        variables = {DS_ENV_FILE: str(ds_env_file), REMOTE_FILE_VARIABLE: path}
        for name, value in environment.items():
            if not _is_passed_on(name) or _is_for_start(name):
                variables.setdefault(name, value)
        # Started as a module, because a `deepspeed` on the PATH may belong to another Python.
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", *options, "--module", "--no_local_rank"]
        status = run_ranks([*launcher, "dschat", *arguments], [variables], signals)
        return status if signals.last is None else 128 + signals.last


def _send_to_launcher(launcher: Child, signal_number: signal.Signals) -> None:
    """Sends a signal to DeepSpeed's launcher and its processes; it handles SIGTERM and Ctrl-C, but not SIGHUP."""
    with suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGTERM if signal_number == signal.SIGHUP else signal_number)


def launcher_variables() -> dict[str, str]:
    """Variables for other machines from DeepSpeed's .deepspeed_env; the current folder's file overrides the home's.

    Raises:
        UserError: a file cannot be read, or a line is not NAME=value.
    """
    relative_path = Path(os.environ.get(DS_ENV_FILE, ".deepspeed_env"))
    paths = dict.fromkeys([Path.home() / relative_path, Path.cwd() / relative_path])  # an absolute path once
    variables: dict[str, str] = {}
    for path in paths:
        lines = _read_lines(path, str(path)) if path.is_file() else []
        for number, line in enumerate(lines, start=1):
            name, equals, value = line.strip().partition("=")
            if not line.strip() or name.startswith("#"):
                continue
            if not equals or not name.strip():
                raise UserError(f"{path}:{number}: the line is not NAME=value; correct it, or begin it with #.")
            variables[name.strip()] = value.strip()
    return variables


def receive() -> None:
    """Reads the variables of this process, if a launcher on another machine has sent them.

    Raises:
        UserError: the file of variables cannot be read.
    """
    file = os.environ.get(REMOTE_FILE_VARIABLE)
    if file is None:
        return
    try:
        os.environ.update(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}, the variables of this run on this machine, cannot be read: {error}.") from error


def check_paths() -> None:
    """Raises UserError if DeepSpeed's launcher cannot name this folder or this Python to other machines."""
    paths = {"the current folder": os.path.abspath("."), "Python": sys.executable}
    for what, path in paths.items():
        if not re.fullmatch(r"[\w+=:,./@-]+", path):
            raise UserError(
                f"--hostfile: {what}, {path}, has characters that the shell of another machine would read otherwise;"
                " use a path of letters, digits and _ . -"
            )


def check_programs() -> None:
    """Raises UserError if a program is missing by which DeepSpeed's launcher reaches other machines."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            raise UserError(
                f"--hostfile names several machines, which are reached by {program}, which is not installed: install"
                f" it (Debian package {package}), or start the command on each machine with --num_nodes, --node_rank"
                " and --master_addr."
            )


def remote_variables(environ: Mapping[str, str], file_variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that go to other machines in a file.

    Args:
        environ: environment of this process.
        file_variables: variables of .deepspeed_env, which all go there.

    Raises:
        UserError: a variable that the start of Python depends on cannot get there by DeepSpeed's launcher.
    """
    delivered: dict[str, str] = {}
    for name, value in environ.items():
        if _is_for_start(name) and MISREAD.search(value):
            raise UserError(
                f"{name}: the shell of another machine would read its value otherwise; remove $, %, quotes,"
                " backslashes and line ends."
            )
        if CARRIED.fullmatch(name) or (_is_passed_on(name) and not _is_for_start(name)):
            delivered[name] = value
    for name in file_variables:
        if _is_for_start(name):
            raise UserError(
                f"{DS_ENV_FILE}: {name} is read when Python starts, before this file is: set it in the environment of"
                " this command."
            )
    return delivered | dict(file_variables)


def _is_passed_on(name: str) -> bool:
    """Whether DeepSpeed's launcher would pass a variable on by itself, on a command line."""
    return name.startswith(PASSED_ON)


def _is_for_start(name: str) -> bool:
    """Whether the start of Python depends on a variable. A secret is never on a command line."""
    return BEFORE_PYTHON.fullmatch(name) is not None and SECRET_NAME.search(name) is None


@contextmanager
def remote_file(variables: Mapping[str, str], hosts: Sequence[str]) -> Iterator[str]:
    """Context in which a file on each machine holds variables; yields its path.

    The file is removed from every machine at the end, also if it could not be written on one of them. A signal whose
    handler returns does not interrupt that.

    Raises:
        UserError: a machine cannot be reached, or the file cannot be written there.
    """
    path = f"/tmp/ma-rlhf-{secrets.token_hex(16)}"
    content = json.dumps(dict(variables)).encode()
    with ThreadPoolExecutor(16) as pool:
        try:
            # Waits for every machine: a file that is written after its removal would stay.
            failures = [failure for failure in pool.map(partial(_write_on, path, content), hosts) if failure]
            if failures:
                raise UserError(failures[0])
            yield path
        finally:
            list(pool.map(partial(_remove_on, path), hosts))


def _write_on(path: str, content: bytes, host: str) -> str:
    """Writes a file that only its owner can read on a machine; two names of one machine write the same content.

    Returns:
        Why the file could not be written; "" if it is written.
    """
    result = _ssh(host, f"sh -c 'umask 077; cat > {path}'", content)
    if result.returncode == 0:
        return ""
    errors = " ".join(result.stderr.decode(errors="replace").split())
    return f"--hostfile: variables could not be sent to {host} by ssh: {errors or 'it says nothing'}."


def _remove_on(path: str, host: str) -> None:
    """Removes what `_write_on` wrote on a machine, or warns.

    Tries twice if ssh itself fails, since Ctrl-C ends ssh, too.
    """
    status = SSH_FAILED
    for _ in range(2):
        if status < 0 or status == SSH_FAILED:
            status = _ssh(host, f"rm -f {path}", b"").returncode
    if status:
        print(f"warning: {path} on {host} could not be removed; it holds this run's variables", file=sys.stderr)


def _ssh(host: str, command: str, content: bytes) -> "subprocess.CompletedProcess[bytes]":
    """Runs a command on a machine with `content` as its standard input; a status of 1 also after a time-out."""
    words = ["ssh", "-o", "PasswordAuthentication=no", host, command]
    try:
        return subprocess.run(words, input=content, capture_output=True, timeout=SSH_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, b"", str(error).replace(command, "…").encode())
