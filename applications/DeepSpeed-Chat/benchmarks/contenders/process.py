# SPDX-License-Identifier: Apache-2.0
"""A contender's process: started, asked for iterations, ended."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from contenders.job import Job

BENCHMARKS = Path(__file__).resolve().parents[1]
LAST_LINES = 15  # of what a failed contender said


class Contender:
    """One contender in a process of its own."""

    def __init__(self, python: str, module: str, job: Job) -> None:
        """Starts it and waits until everything is set up.

        Args:
            python: the interpreter.
            module: of the package contenders.
            job: what it does.

        Raises:
            RuntimeError: it ended; with the last lines of what it said.
        """
        self._log = Path(job.folder) / "log.txt"
        with open(self._log, "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"contenders.{module}", str(job.write())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | environment_of(job),
                cwd=job.folder,
            )
        self._answer()

    def iterate(self) -> dict[str, Any]:
        """One iteration; its figures, see `Meter.end`."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise failure(self._log)
        return json.loads(line)


def environment_of(job: Job) -> dict[str, str]:
    """What a contender's process needs: this package, and dschat of the same clone before what is installed."""
    given = os.environ.get("PYTHONPATH")
    folders = [str(BENCHMARKS), str(BENCHMARKS.parent), *([given] if given else [])]
    return {"OMP_NUM_THREADS": str(job.threads), "PYTHONPATH": os.pathsep.join(folders)}


def failure(log: Path) -> RuntimeError:
    """For a contender that ended early: the last lines of what it said."""
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return RuntimeError("\n".join(["a contender ended early:", *said]))
