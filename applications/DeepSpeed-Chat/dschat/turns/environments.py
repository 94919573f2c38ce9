# SPDX-License-Identifier: Apache-2.0
"""Environments in processes of their own: one for each episode, with a deadline for every call.

If an environment raises an error, returns a wrong value or does not answer in time, only its own episode fails: its
process is killed, and the call returns a `Failure`.
"""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path

from dschat.base.errors import UserError
from dschat.run.state import SeedKind, derive_seed
from dschat.run.stop import raise_if_stopped_here
from dschat.turns.environment import FLAG, EnvironmentTraits, Message, StepResult
from dschat.turns.environment_server import kill_group
from dschat.turns.simulated_user import UserSettings

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 1.0  # seconds between two checks for SIGTERM or Ctrl-C during a wait
CLOSE_TIMEOUT = 5.0  # seconds for the server to end by itself
ENVIRONMENT = 2**32 - 1  # in the seeds of environments: they are none of the actor's
Call = tuple[str, object, object]  # ("reset", row, seed) or ("step", messages, reply)


def environment_seed(seed: int, kind: SeedKind, iteration: int, index: int) -> int:
    """The seed of all environments of a row in an iteration, so that its episodes begin alike.

    Args:
        seed: of the run.
        kind: what the episodes are for.
        iteration: number of the iteration.
        index: number of the row.
    """
    return derive_seed(seed, kind, iteration, index, ENVIRONMENT)


@dataclass(frozen=True)
class Failure:
    """The result of a call whose environment has failed; `problem` says why."""

    problem: str


Result = list[Message] | StepResult | Failure


class EpisodeProcess:
    """The process of one environment, seen from the training process."""

    def __init__(self, address: str, timeout: float) -> None:
        """Connects to the server, which forks the process. Raises UserError if the server has ended."""
        try:
            self._connection: Connection = Client(address, "AF_UNIX")  # type: ignore[explicit-any]
            if not self._connection.poll(timeout):
                raise EOFError
            self._pid: int = self._connection.recv()
        except (OSError, EOFError) as error:
            raise UserError(
                f"{FLAG}: the process that starts environments has ended, or does not answer in {timeout:g} s."
            ) from error

    @property
    def connection(self) -> Connection:  # type: ignore[explicit-any]
        """The connection, for `multiprocessing.connection.wait`."""
        return self._connection

    def send(self, call: Call) -> None:
        """Sends a call. If the process has ended, `receive` returns a `Failure`."""
        with suppress(OSError):
            self._connection.send(call)

    def receive(self) -> Result:
        """Waits for the answer to the last call and returns it."""
        try:
            answer: list[Message] | StepResult | str = self._connection.recv()
        except (EOFError, OSError):
            self.kill()
            return Failure(f"{FLAG}: the environment's process has ended")
        return Failure(answer) if isinstance(answer, str) else answer

    def kill(self) -> None:
        """Kills the process and all processes that it has started."""
        kill_group(self._pid)
        self.close()

    def close(self) -> None:
        """Closes the connection. The process then closes its environment and ends."""
        self._connection.close()


class EnvironmentPool:
    """Starts environments of one class, and calls many of them at the same time."""

    def __init__(self, spec: str, timeout: float, workers: int, user: UserSettings | None = None) -> None:
        """Starts the server and waits until it has loaded the class.

        Args:
            spec: ``module.py:Class``, or the name of the simulated user.
            timeout: seconds for a call, and for loading the class.
            workers: calls at the same time.
            user: settings of a simulated user in the place of a class.

        Raises:
            UserError: the class cannot be loaded, or lacks a method or attribute of an environment.
        """
        self._timeout = timeout
        self._workers = workers
        self._folder = tempfile.TemporaryDirectory(prefix="environments-", dir="/tmp")  # a socket's path is short
        self._address = str(Path(self._folder.name) / "socket")
        self._allow_connections()
        read_end, write_end = os.pipe()
        user_argument = "" if user is None else user.to_json()
        arguments = [spec, self._address, str(write_end), user_argument]
        self._server = subprocess.Popen(
            [sys.executable, "-m", "dschat.turns.environment_server", *arguments],
            stdin=subprocess.PIPE,
            pass_fds=[write_end],
            start_new_session=True,  # Ctrl-C ends the training process, and with it the server
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )
        os.close(write_end)
        report = self._read_report(read_end)
        if not isinstance(report, EnvironmentTraits):
            kill_group(self._server.pid)  # it may still import the file, or have started processes
            self.close()
            # The report may begin with the flag already.
            problem = str(report).removeprefix(f"{FLAG} {spec}: ").removeprefix(f"{FLAG}: ")
            raise UserError(f"{FLAG} {spec}: {problem}")
        self.traits = report

    def close(self) -> None:
        """Ends the server and all environments."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(CLOSE_TIMEOUT)
        kill_group(self._server.pid)
        self._server.wait()
        self._folder.cleanup()

    @contextmanager
    def episodes(self, count: int) -> Iterator[list[EpisodeProcess]]:
        """Processes of new environments, which end with the context."""
        processes: list[EpisodeProcess] = []
        try:
            for _ in range(count):
                processes.append(EpisodeProcess(self._address, self._timeout))
            yield processes
        finally:
            for process in processes:
                process.close()

    def call(self, processes: Sequence[EpisodeProcess], calls: Sequence[Call]) -> list[Result]:
        """Sends one call to each process and returns the results. At most `workers` calls run at the same time.

        Raises:
            Stopped: on this rank alone, after a signal.
        """
        results: list[Result] = [Failure("not called")] * len(calls)
        waiting = deque(range(len(calls)))
        deadlines: dict[int, float] = {}  # number of a running call → time at which it fails
        numbers = {id(process.connection): number for number, process in enumerate(processes)}
        while waiting or deadlines:
            raise_if_stopped_here()
            while waiting and len(deadlines) < self._workers:
                number = waiting.popleft()
                processes[number].send(calls[number])
                deadlines[number] = time.monotonic() + self._timeout
            next_deadline = min(deadlines.values())
            patience = min(LOOK_INTERVAL, max(0.0, next_deadline - time.monotonic()))
            ready = wait([processes[number].connection for number in deadlines], patience)
            for connection in ready:
                number = numbers[id(connection)]
                del deadlines[number]
                results[number] = processes[number].receive()
            for number, deadline in list(deadlines.items()):
                if time.monotonic() > deadline:
                    del deadlines[number]
                    processes[number].kill()
                    results[number] = Failure(
                        f"{FLAG}: {calls[number][0]} did not return in {self._timeout:g} s (--environment_timeout)"
                    )
        return results

    def _read_report(self, read_end: int) -> object:
        """The report of the server when it has loaded the class; a message if there is none."""
        with Connection(read_end, writable=False) as pipe:
            if not pipe.poll(self._timeout):
                return f"importing the file took more than {self._timeout:g} s (--environment_timeout)"
            try:
                report: object = pipe.recv()
            except EOFError:
                return "its process ended while it imported the file"
        return report

    @staticmethod
    def _allow_connections() -> None:
        """Raises the limit of open files to its maximum, because every episode has a connection."""
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
