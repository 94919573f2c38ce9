# SPDX-License-Identifier: Apache-2.0
"""The process that runs environments: it loads a user's class once, and forks a process for every episode.

`dschat.rollouts.environments` starts it with ``python -m`` and talks to the episodes' processes through a socket. The
server ends with the training process, whose end of its standard input it watches, and takes its episodes with it.
"""

from __future__ import annotations

import os
import pickle
import random
import selectors
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener

from dschat.base.errors import UserError
from dschat.base.user_function import load_function
from dschat.rollouts.environment import FLAG, Environment, reset_environment, step_environment, traits_of

BACKLOG = 128  # episodes that wait for their process


def main(
    spec: str,
    address: str,
    report_end: int,
) -> None:
    """Loads the class, reports how that went, and serves episodes until the training process has ended.

    Args:
        spec: ``module.py:Class``.
        address: path of the socket.
        report_end: descriptor of a pipe, to which the class's traits are written, or a message of what went wrong.
    """
    report: object
    listener: Listener | None = None
    try:
        environment_class = load_function(spec, FLAG)
        report = traits_of(environment_class)
        listener = Listener(address, "AF_UNIX", backlog=BACKLOG)
    except UserError as error:
        report = str(error)
    with os.fdopen(report_end, "wb") as pipe:
        pickle.dump(report, pipe)
    if listener is not None:
        _serve(listener, environment_class)


def _serve(listener: Listener, environment_class: Callable[[], Environment]) -> None:
    """Forks a process for each connection; ends, and ends those, when standard input is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes that have ended leave no zombies
    selector = selectors.DefaultSelector()
    listening_socket = listener._listener._socket  # type: ignore[attr-defined]
    selector.register(listening_socket, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                os.killpg(0, signal.SIGKILL)  # this process leads a group of its own
            connection = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening_socket.close()
                try:
                    play_episode(connection, environment_class)
                finally:
                    os._exit(0)  # a training process that has closed the connection is no error
            connection.close()


def play_episode(  # type: ignore[explicit-any]  # a connection carries anything
    connection: Connection,
    environment_class: Callable[[], Environment],
) -> None:
    """Answers the calls of one episode until the other side closes the connection.

    A call is ("reset", row, seed) or ("step", messages, reply). The answer is what the environment returned, or a text
    that says what went wrong.
    """
    connection.send(os.getpid())
    environment: Environment | None = None
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        answer: object
        try:
            if name == "reset":
                _seed_everything(arguments[1])
                environment = environment_class()
                answer = reset_environment(environment, *arguments)
            else:
                assert environment is not None  # reset comes first
                answer = step_environment(environment, *arguments)
        except UserError as error:
            answer = str(error)
        except (Exception, SystemExit) as error:  # of the constructor, or a call of sys.exit
            answer = f"{FLAG}: {type(error).__name__}: {error}"
        connection.send(answer)


def _seed_everything(seed: int) -> None:
    """Seeds the global generators, which every process would otherwise inherit in one state."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


if __name__ == "__main__":
    _, spec_argument, address_argument, report_argument = sys.argv
    main(spec_argument, address_argument, int(report_argument))
