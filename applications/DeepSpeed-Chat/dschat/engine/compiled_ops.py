# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed compiles on first use: said beforehand, and not waited for where nobody compiles any more."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import psutil
from torch.utils import cpp_extension

logger = logging.getLogger(__name__)

YOUNG = 600  # seconds; no op takes so long to compile


def prepare_op(name: str) -> None:
    """To be called before DeepSpeed loads an op.

    While torch compiles an op, it holds a file called `lock` open beside it, and other processes wait until that is
    gone. A process that is killed then leaves it there, and every later one would wait for ever.

    Args:
        name: of the op, such as cpu_adam.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return
    folder = Path(cpp_extension._get_build_directory(name, verbose=False))
    lock = folder / "lock"
    if lock.exists() and not _is_held(lock):
        logger.warning("%s: removing the lock of a compilation that was killed", folder)
        lock.unlink(missing_ok=True)
    if not any(folder.glob("*.so")):
        logger.info("compiling DeepSpeed's %s, once on this machine; this takes a minute or two", name)


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the file open; or, where there are several machines, it is young."""
    if int(os.environ.get("CROSS_SIZE", "1")) > 1 and time.time() - lock.stat().st_mtime < YOUNG:
        return True
    for process in psutil.process_iter():
        try:
            if any(Path(opened.path) == lock for opened in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue  # somebody else's, or gone
    return False
