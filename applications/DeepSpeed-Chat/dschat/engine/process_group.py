# SPDX-License-Identifier: Apache-2.0
"""Starts and ends the process group, chooses a run's dtype, and prepares what DeepSpeed compiles on first use."""

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
from torch.distributed import distributed_c10d
from torch.utils import cpp_extension

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU

import deepspeed  # noqa: E402
from deepspeed.runtime import bf16_optimizer  # noqa: E402

from dschat.base.errors import UserError  # noqa: E402
from dschat.models.opening import choose_dtype  # noqa: E402
from dschat.run.distributed import device, make_host_groups  # noqa: E402

logger = logging.getLogger(__name__)

SHARED_MEMORY_OP = "deepspeed_shm_comm"  # collectives of a machine's processes, which DeepSpeed trains without
COMPILE_SECONDS = 600  # upper bound on the time to compile an op
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def process_group(timeout: float = 1800, save_timeout: float = 7200) -> Iterator[None]:
    """Joins the launcher's process group, or creates one with a single process, and leaves it at the end.

    Args:
        timeout: seconds that ranks wait for each other in a collective.
        save_timeout: seconds that they wait while others read or write files.
    """
    quieten_deepspeed()
    is_launched = "RANK" in os.environ
    earlier_variables = {name: os.environ.get(name) for name in LAUNCH_VARIABLES}
    if not is_launched:
        with socket.socket() as free_socket:
            free_socket.bind(("127.0.0.1", 0))
            port = free_socket.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    was_initialized = dist.is_initialized()
    try:
        _join_group(timeout, save_timeout)
        yield
        dist.barrier()
    finally:
        if dist.is_initialized() and not was_initialized:
            deepspeed.comm.destroy_process_group()  # also releases the groups that DeepSpeed keeps
        if not is_launched:  # processes that are started later do not belong to this group
            for name, value in earlier_variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _join_group(timeout: float, save_timeout: float) -> None:
    """Selects this process's GPU and joins the group that the launcher's variables describe."""
    has_gpu = torch.cuda.is_available()  # not `device()`, which would create a context on GPU 0
    # DeepSpeed would look this op up among the compatibility of all its ops, for which it compiles and links a program
    # per op: that takes seconds and prints linker errors for unrelated libraries.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})[SHARED_MEMORY_OP] = False
    if has_gpu:
        _select_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    # Groups that DeepSpeed makes take torch's defaults: 10 minutes with NCCL, which --ddp_timeout would not change.
    wait = timedelta(seconds=timeout)
    distributed_c10d.default_pg_timeout = wait
    distributed_c10d.default_pg_nccl_timeout = wait
    with _explain_rendezvous(timeout):
        if _has_other_machines():
            from dschat.engine.interface import choose_interface

            choose_interface()
        deepspeed.init_distributed(dist_backend="nccl" if has_gpu else "gloo", timeout=wait)
    make_host_groups(timeout, save_timeout)


def _has_other_machines() -> bool:
    """Whether processes of the run are on other machines, by the variables of torchrun or DeepSpeed's launcher."""
    processes = os.environ.get("WORLD_SIZE", "1")
    return (os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", processes)) != processes


@contextmanager
def _explain_rendezvous(timeout: float) -> Iterator[None]:
    """Logs which processes this one waits for, and names the flags to check if they do not join."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    processes = os.environ["WORLD_SIZE"]
    if _has_other_machines() and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("waiting up to %g s for the %s processes of all machines at %s", timeout, processes, address)
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
            f"not all of the {processes} processes joined at {address} within {timeout:g} s (--ddp_timeout): start "
            "dschat on every machine, with the same --num_nodes, --num_gpus, --master_addr and --master_port and its "
            "own --node_rank."
        ) from error


def _select_gpu(local_rank: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {os.environ['RANK']} is process {local_rank} of its node, which has {torch.cuda.device_count()} "
            "visible GPUs: give the launcher --num_gpus, at most that many."
        )
    torch.cuda.set_device(local_rank)


def training_dtype(name: str | None) -> torch.dtype:
    """The dtype of ``--dtype``; by default bf16 on a GPU and fp32 on a CPU. Raises UserError for fp16 on a CPU."""
    if name == "fp16" and device().type != "cuda":
        raise UserError("--dtype fp16 needs a GPU: without one use --dtype bf16 or --dtype fp32.")
    return choose_dtype(name, device())


def quieten_deepspeed() -> None:
    """Limits DeepSpeed's log to warnings, and stops its bf16 optimiser from printing memory use."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    bf16_optimizer.see_memory_usage = lambda message, force=False: None


def prepare_op(name: str) -> None:
    """Prepares the compilation of an op such as cpu_adam; call it before DeepSpeed loads the op.

    While torch compiles an op, it keeps a file `lock` in the op's folder, and other processes wait until it is gone.
    A killed process leaves the file behind, and later ones would wait forever. So a lock that no process holds is
    removed.

    Raises:
        UserError: the folder in which torch compiles cannot be written.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return
    try:
        folder = Path(cpp_extension._get_build_directory(name, verbose=False))
        lock = folder / "lock"
        with suppress(FileNotFoundError):  # the process that held it has just finished
            if lock.exists() and not _is_held(lock):
                logger.warning("%s: removing the lock of a compilation that was killed", folder)
                lock.unlink()
    except OSError as error:
        raise UserError(
            f"DeepSpeed's {name} cannot be compiled: {error}. Set TORCH_EXTENSIONS_DIR to a folder that can be "
            "written."
        ) from error
    if not any(folder.glob("*.so")):
        logger.info("compiling DeepSpeed's %s, once on this machine; this takes a minute or two", name)


def _is_held(lock: Path) -> bool:
    """Whether a process may hold the lock: it has the file open, or cannot be seen and has made the file lately.

    Processes of other machines and of other users cannot be seen. Raises FileNotFoundError if the lock is gone.
    """
    status = lock.stat()
    is_recent = time.time() - status.st_mtime < COMPILE_SECONDS
    if is_recent and (_has_other_machines() or status.st_uid != os.getuid()):
        return True
    for process in psutil.process_iter():
        try:
            if any(Path(opened.path) == lock for opened in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue  # another user's, or ended
    return False
