# SPDX-License-Identifier: Apache-2.0
"""`kill_when` kills a command once a condition holds; `rows_kept` counts the rows that its journal then has."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cli_runs import TIMEOUT, environment


def kill_when(command: Sequence[Any], now: Callable[[], bool], cwd: Path, **variables: str | None) -> str:
    """Starts a command and kills it as soon as something is so, before it ends by itself; what it wrote to stderr."""
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=cwd,
        env=environment(**variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + TIMEOUT
    while not now() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    stderr = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, f"it ended before it was killed: {stderr}"
    return stderr


def rows_kept(journal: Path) -> int:
    """Rows of a journal, whose first line holds the settings."""
    return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0
