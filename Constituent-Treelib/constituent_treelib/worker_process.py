# SPDX-License-Identifier: Apache-2.0
"""A child process that answers JSON lines with JSON lines, each before a deadline, or is killed."""

import contextlib
import json
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

START_SECONDS = 60.0


class WorkerError(Exception):
    """The process gave no answer: it took too long, ended, or answered with no JSON. It is not running any more."""


class WorkerStartError(WorkerError):
    """The process could not be started, or was not ready in time."""


class WorkerProcess:
    """Starts the process when it is asked something and none is running; not for several threads at a time.

    The process is ended by `close`, with this object, and at the end of this interpreter. A fork of this interpreter
    starts a process of its own.
    """

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        """Starts nothing yet. The first line of the command says that it is ready; an answer may take `seconds`."""
        self._command, self._seconds = list(command), seconds
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._end: weakref.finalize | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process; None if there is none."""
        return self._process.pid if self._process is not None and self._owner == os.getpid() else None

    def start(self) -> Any:
        """Starts the process, and ends the one that is running; returns the value of its first line.

        Raises:
            WorkerStartError: it could not be started, or was not ready in `START_SECONDS`.
        """
        self.close()
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        environment = os.environ | {"LC_ALL": "C.UTF-8"}
        try:
            process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment, encoding="utf-8"
            )
        except OSError as error:
            raise WorkerStartError(f"could not be started: {error}") from error
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _end, process, self._owner)
        try:
            return self._exchange("", START_SECONDS)
        except WorkerError as error:
            raise WorkerStartError(f"did not start: {error}") from error

    def ask(self, value: Any) -> Any:
        """The answer of the process.

        Raises:
            WorkerError: there is none.
            WorkerStartError: there was no process, and none could be started.
        """
        if self.pid is None:
            self.start()
        return self._exchange(json.dumps(value) + "\n", self._seconds)

    def close(self) -> None:
        """Ends the process. The next question starts another one."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _exchange(self, question: str, seconds: float) -> Any:
        """Writes a question and reads a line; a process that takes too long is killed, which ends the wait."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer, deadline = threading.Timer(seconds, process.kill), time.monotonic() + seconds
        timer.start()
        try:
            process.stdin.write(question)
            process.stdin.flush()
            line = process.stdout.readline()
            if not line.endswith("\n"):
                late = time.monotonic() >= deadline
                raise TimeoutError(f"no answer in {seconds:g} s") if late else EOFError("ended without an answer")
            return json.loads(line)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise WorkerError(f"{type(error).__name__}: {error}") from error
        except BaseException:  # an interrupted wait: what is answered later would be taken for the next answer
            self.close()
            raise
        finally:
            timer.cancel()


def _end(process: subprocess.Popen[str], owner: int) -> None:
    """Kills a process of this interpreter's; of another's, after a fork, only lets go of its pipes."""
    if owner == os.getpid():
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # of a question that nobody reads any more
                pipe.close()
