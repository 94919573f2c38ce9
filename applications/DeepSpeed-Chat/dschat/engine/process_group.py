# SPDX-License-Identifier: Apache-2.0
"""The process group's beginning and end, the dtype of a run, and what DeepSpeed compiles on first use."""

import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.utils import cpp_extension

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no GPU

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.runtime import bf16_optimizer  # noqa: E402

from dschat.base.errors import UserError  # noqa: E402
from dschat.models.opening import choose_dtype  # noqa: E402
from dschat.run.distributed import make_host_groups  # noqa: E402

logger = logging.getLogger(__name__)

SHARED_MEMORY = "deepspeed_shm_comm"  # DeepSpeed's collectives between processes of one machine
YOUNG = 600  # seconds; no op takes so long to compile
SHARED_FOLDER = Path("/dev/shm")
# Of collectives between processes of one machine without GPUs: DeepSpeed's, 69 MB a process, which it never removes,
# and vLLM's, whose next start fails where they are.
SHARED_FILES = ("deepspeed_allreduce_buffer_*", "*tp:0-*cpushm*")
SECONDS_TO_MAP = 10  # from a file's making to its use, at most


@contextmanager
def process_group(timeout: float = 1800) -> Iterator[None]:
    """Joins the launcher's process group, or makes one of a single process, and leaves it at the end. Ranks wait
    `timeout` seconds for each other in a collective.
    """
    quieten_deepspeed()
    launched = "RANK" in os.environ
    if not launched:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(alone, MASTER_PORT=str(port))
    if os.environ["WORLD_SIZE"] == "1":
        # Shared-memory collectives are of no use to one process, and compiling them takes most of a minute.
        decide_on_shared_memory(False)
    elif not torch.cuda.is_available():
        remove_left_memory()
        decide_on_shared_memory(True)
        prepare_op(SHARED_MEMORY)
    if torch.cuda.is_available():
        _choose_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with _meeting(timeout):
        deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout))
    make_host_groups(timeout)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
        remove_own_memory()
        if not launched:  # processes started later shall not think they belong here
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name, None)


@contextmanager
def _meeting(timeout: float) -> Iterator[None]:
    """Says for whom this process waits, and which flags to look at where they do not come."""
    where, world = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", os.environ["WORLD_SIZE"]
    here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", world)  # torchrun's, DeepSpeed's
    if here != world and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("waiting up to %g s for the %s processes of all machines at %s", timeout, world, where)
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"--master_port {os.environ['MASTER_PORT']}: another run listens there on {os.environ['MASTER_ADDR']}."
                " End it, or give another port, the same on all machines."
            ) from error
        if not re.search("timed out|waiting for clients", str(error), re.IGNORECASE):
            raise
        raise UserError(
            f"not all of the {world} processes came to {where} in {timeout:g} s (--ddp_timeout): start dschat on every"
            " machine, with the same --num_nodes, --num_gpus, --master_addr and --master_port and its own --node_rank."
        ) from error


def _choose_gpu(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {os.environ['RANK']} is process {local_rank} of its node, which has {torch.cuda.device_count()} "
            "visible GPUs: give the launcher --num_gpus, at most that many."
        )
    torch.cuda.set_device(local_rank)


def training_dtype(name: str | None) -> torch.dtype:
    """The dtype of ``--dtype``; by default bf16 on a GPU and fp32 on a CPU. UserError for fp16 without a GPU."""
    if name == "fp16" and not torch.cuda.is_available():
        raise UserError("--dtype fp16 needs a GPU: without one use --dtype bf16 or --dtype fp32.")
    return choose_dtype(name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def quieten_deepspeed() -> None:
    """Only warnings are logged, and the optimiser for bf16 prints no memory figures, for which it has no switch."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bf16_optimizer.see_memory_usage = lambda message, force=False: None


def decide_on_shared_memory(wanted: bool) -> None:
    """Says whether DeepSpeed may use `SHARED_MEMORY`, where it can be compiled at all.

    DeepSpeed would look up the answer among those for all ops. To have them, it compiles and links a program for each,
    which takes seconds and lets the linker complain of libraries that nobody asked for.
    """
    known = vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    if not wanted:
        known[SHARED_MEMORY] = False
    elif SHARED_MEMORY not in known:
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        known[SHARED_MEMORY] = builder is not None and builder.is_compatible()


def remove_left_memory() -> None:
    """Removes this user's shared memory that no process uses: killed runs left it. For one process of a machine."""
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return
    left = []
    for file in _shared_files():
        with suppress(FileNotFoundError):  # another run has just ended
            status = file.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > SECONDS_TO_MAP:
                left.append(file)
    used = set().union(*(_files_used_by(process) for process in Path("/proc").glob("[0-9]*"))) if left else set()
    for file in left:
        if str(file) not in used:
            logger.info("removing %s, which a killed run left", file)
            file.unlink(missing_ok=True)


def remove_own_memory() -> None:
    """Removes the names of shared memory that this process uses, once it needs them no more."""
    used = _files_used_by(Path("/proc/self"))
    for file in _shared_files():
        if str(file) in used:
            file.unlink(missing_ok=True)


def _shared_files() -> list[Path]:
    return [file for pattern in SHARED_FILES for file in SHARED_FOLDER.glob(pattern)]


def _files_used_by(process: Path) -> set[str]:
    """Files that a process, a folder of /proc, has in its memory."""
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:  # somebody else's, or gone
        return set()
    return {line[line.index("/") :] for line in lines if "/" in line}


def prepare_op(name: str) -> None:
    """To be called before DeepSpeed loads an op, such as cpu_adam.

    While torch compiles an op, it holds a file called `lock` open beside it, and other processes wait until that is
    gone. A process that is killed then leaves it there, and every later one would wait for ever.

    Raises:
        UserError: the folder in which torch compiles cannot be written.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return
    try:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        lock = folder / "lock"
        if lock.exists() and not _is_held(lock):
            logger.warning("%s: removing the lock of a compilation that was killed", folder)
            lock.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"DeepSpeed's {name} cannot be compiled: {error}. Set TORCH_EXTENSIONS_DIR to a folder that can be "
            "written."
        ) from error
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
