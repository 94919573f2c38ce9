# SPDX-License-Identifier: Apache-2.0
"""The process that runs environments: it loads a user's class once, and forks a process for every episode.

`dschat.turns.environments` starts it with ``python -m`` and talks to the episodes' processes through a socket. The
server ends with the training process, whose end of its standard input it watches, and takes its episodes with it.

Every episode's process leads a process group, which is killed when the episode ends: programs that an environment has
started do not outlive it, unless they begin a group or session of their own.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Listener, wait

from dschat.base.errors import UserError
from dschat.base.user_function import call_function, load_function
from dschat.turns.environment import (
    FLAG,
    Environment,
    EnvironmentTraits,
    reset_environment,
    step_environment,
    traits_of,
)

BACKLOG = 128  # episodes that wait for their process
CLOSE_TIMEOUT = 10  # seconds for an environment's `close`
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main(spec: str, address: str, report_end: int, user: str) -> None:
    """Loads the class, reports how that went, and serves episodes until the training process has ended.

    Args:
        spec: ``module.py:Class``.
        address: path of the socket.
        report_end: descriptor of a pipe, to which the class's traits are sent, or a message of what went wrong.
        user: settings of a simulated user in the class's place, as JSON; empty for a class.
    """
    report: object
    listener: Listener | None = None
    # Before any episode, so that its generator is seeded also if an environment imports it as late as in `reset`.
    with suppress(ImportError):
        import_module("numpy")
    try:
        environment_class, report = load_environment(spec, user)
        listener = Listener(address, "AF_UNIX", backlog=BACKLOG)
    except UserError as error:
        report = str(error)
    except Exception as error:
        report = f"{type(error).__name__}: {error}"
    with Connection(report_end, readable=False) as pipe:
        pipe.send(report)
    if listener is not None:
        _serve(listener, environment_class)


def load_environment(spec: str, user: str) -> tuple[Callable[[], Environment], EnvironmentTraits]:
    """What makes the environment of an episode, and its traits; for the arguments see `main`. Raises UserError."""
    if not user:
        environment_class = load_function(spec, FLAG)
        return environment_class, traits_of(environment_class)

    from dschat.turns.simulated_user import UserSettings, load_simulated_user

    return load_simulated_user(UserSettings.from_json(user)), EnvironmentTraits()


def _serve(listener: Listener, environment_class: Callable[[], Environment]) -> None:
    """Forks a process for each connection; ends, and ends those, when standard input is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a file that ignores it would leave no status to wait for
    listening_socket = listener._listener._socket  # type: ignore[attr-defined]
    standard_input = sys.stdin.fileno()
    episode_pids: set[int] = set()
    _flush_output()  # otherwise every forked process would write what the import has printed
    while True:
        if standard_input in wait([listening_socket, standard_input]):
            for pid in episode_pids:
                kill_group(pid)
            os.killpg(0, signal.SIGKILL)  # this process leads a group of its own
        for pid in list(episode_pids):
            if os.waitpid(pid, os.WNOHANG)[0]:  # has ended
                episode_pids.discard(pid)
        connection = listener.accept()
        pid = os.fork()
        if pid == 0:
            listening_socket.close()
            try:
                _lead_group()
                play_episode(connection, environment_class)
            finally:  # a training process that has closed the connection is no error
                _flush_output()
                kill_group(os.getpid())
                os._exit(0)
        episode_pids.add(pid)
        connection.close()


def _lead_group() -> None:
    """Makes this process the leader of a process group, which ends with the server."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)


def _flush_output() -> None:
    """Writes what the environments have printed; output that nobody reads any more is lost."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def kill_group(pid: int) -> None:
    """Kills a process group, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def play_episode(  # type: ignore[explicit-any]  # a connection carries anything
    connection: Connection, environment_class: Callable[[], Environment]
) -> None:
    """Answers the calls of one episode until the other side closes the connection.

    A call is ("reset", row, seed) or ("step", messages, reply). The answer is what the environment returned, or a text
    that says what went wrong.
    """
    connection.send(os.getpid())
    environment: Environment | None = None
    try:
        while True:
            name, *arguments = connection.recv()
            answer: object
            try:
                if name == "reset":
                    _seed_everything(arguments[1])
                    environment = call_function(environment_class, FLAG)
                    answer = reset_environment(environment, *arguments)
                else:
                    assert environment is not None  # reset comes first
                    answer = step_environment(environment, *arguments)
            except UserError as error:
                answer = _loggable(str(error))
            except BaseException as error:  # of what was returned, or what pytest or sys.exit raises
                answer = _loggable(f"{FLAG}: {type(error).__name__}: {error}")
            connection.send(answer)
    except (EOFError, OSError):  # the training process has closed the connection
        return
    finally:
        _close(environment)


def _loggable(problem: str) -> str:
    """Text that UTF-8 can encode, whatever an error says."""
    return problem.encode(errors="backslashreplace").decode()


def _close(environment: Environment | None) -> None:
    """Calls the environment's `close`, if it has one. What goes wrong there is written to standard error."""
    close = getattr(environment, "close", None)
    if not callable(close):
        return
    signal.signal(signal.SIGALRM, lambda *_: kill_group(os.getpid()))
    signal.alarm(CLOSE_TIMEOUT)
    try:
        close()
    except (Exception, SystemExit) as error:
        print(f"{FLAG}: close failed: {type(error).__name__}: {error}", file=sys.stderr)


def _seed_everything(seed: int) -> None:
    """Seeds the global generators, which every process would otherwise inherit in one state."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


if __name__ == "__main__":
    _, spec_argument, address_argument, report_argument, user_argument = sys.argv
    main(spec_argument, address_argument, int(report_argument), user_argument)
