# SPDX-License-Identifier: Apache-2.0
"""--save_command: copies checkpoints elsewhere while training goes on.

One command runs at a time. A checkpoint that is saved in the meantime is passed over, unless it is the last one:
that one is copied before the run ends. A command that fails, or cannot be started, is a warning. `dschat` may be such
a command.
"""

import logging
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

FOLDER = "CHECKPOINT"  # environment variable with the checkpoint's folder
# Environment variables by which `dschat` takes itself for this rank, or its error for the run's.
OF_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MA_RLHF_ERROR_FILE",
)
LAST_LINES = 5  # of the output of a command that has failed
LAST_BYTES = 2000  # of these lines


@dataclass(frozen=True)
class Copy:
    """A command that was started."""

    folder: Path  # the checkpoint
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]


class SaveCommand:
    """Runs a shell command for one checkpoint after the other, in the background; on the main process."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._running: Copy | None = None
        self._waiting: Path | None = None  # the newest checkpoint, if the command still ran when it was saved

    @property
    def folder(self) -> Path | None:
        """The checkpoint that is being copied, which must not be removed."""
        if self._running is not None and self._running.process.poll() is not None:
            self._end(self._running)
        return None if self._running is None else self._running.folder

    def start(self, folder: Path) -> None:
        """Runs the command for a checkpoint, unless it still runs for an earlier one; returns at once."""
        if self.folder is not None:
            logger.warning("--save_command still runs for %s: %s is not copied yet", self.folder, folder)
            self._waiting = folder
            return
        self._waiting = None
        environment = {name: value for name, value in os.environ.items() if name not in OF_RANK}
        try:
            output = tempfile.TemporaryFile()
            process = subprocess.Popen(
                self._command,
                shell=True,
                env=environment | {FOLDER: str(folder.resolve())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C does not reach it: the run saves another checkpoint first
            )
        except OSError as error:
            logger.warning("--save_command for %s cannot be started, the run goes on: %s", folder, error)
            return
        self._running = Copy(folder, process, output)

    def finish(self, seconds: float) -> None:
        """Waits until the newest checkpoint is copied, for at most so long; a warning says if it is not."""
        end = time.monotonic() + seconds
        while self._running is not None:
            try:
                self._running.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                folder = self._running.folder
                logger.warning("--save_command for %s has not ended after %.0f s, and runs on", folder, seconds)
                if self._waiting is not None:
                    logger.warning("%s is not copied: run --save_command for it yourself", self._waiting)
                return
            self._end(self._running)
            if self._waiting is not None:
                self.start(self._waiting)

    def _end(self, copy: Copy) -> None:
        """Warns if a command that has ended has failed."""
        self._running = None
        with copy.output as output:
            if copy.process.returncode == 0:
                return
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - LAST_BYTES))
            lines = output.read().decode(errors="replace").splitlines()
        logger.warning(
            "--save_command for %s has failed with status %d, the run goes on: %s",
            copy.folder,
            copy.process.returncode,
            "\n".join(lines[-LAST_LINES:]) or "it has printed nothing",
        )
