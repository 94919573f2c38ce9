# SPDX-License-Identifier: Apache-2.0
"""Compares all processes before anything is loaded, so that a run fails at once rather than after minutes."""

import importlib.metadata
import logging
import os
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name

import psutil
import torch

from dschat.base.atomic import missing_folders, remove_empty
from dschat.base.errors import UserError
from dschat.run.distributed import barrier, broadcast_object, device, gather_objects, is_main, rank, world_size
from dschat.settings.common import CommonConfig
from dschat.settings.flags import flags_of

logger = logging.getLogger(__name__)

VISIBLE_WITHIN = 60.0  # seconds; NFS may cache for that long that a new folder does not exist
# What a plan says of a run: the memory that it needs in any case (None: nothing is compared), and a warning where its
# GPU may be too small.
MINIMUM_MEMORY: str | None = "dschat.plan.minimum:minimum_memory"
GPU_WARNING = "dschat.plan.remedies:warn_of_gpu_memory"
# Flags that each machine may have for itself, like all paths and what environment variables give.
MACHINE_FLAGS = ("local_rank", "judge_url", "reward_url", "user_server", "vllm_url")
PACKAGES = ("torch", "transformers", "deepspeed", "peft", "numpy")


@dataclass(frozen=True)
class MinimumMemory:
    """Bytes that a process holds from the first update on, whatever the batches are, and that the run writes."""

    main: int  # main memory: without a GPU all models and optimizer states, otherwise what is offloaded
    gpu: int  # GPU memory; 0 without a GPU
    drawing: int = 0  # additional GPU memory during sampling: the actor's weights, which ZeRO 3 gathers
    disk: int = 0  # on the disk of --output_dir, at a time


@dataclass(frozen=True)
class ProcessReport:
    """The state of one process."""

    rank: int
    host: str
    versions: tuple[tuple[str, str], ...]
    flags: dict[str, str]  # see `shared_flags`
    folder_problem: str | None  # why output_dir cannot be used
    free_memory: int  # bytes of main memory
    needed_memory: int  # bytes of models and optimiser states in main memory
    gpu_memory: int = 0  # bytes of its GPU
    needed_gpu_memory: int = 0  # bytes of models and optimiser states on the GPU
    sampling_memory: int = 0  # further bytes on the GPU for the whole actor while responses are sampled


def preflight(config: CommonConfig) -> None:
    """Checks on all processes: equal versions and flags, a writable and shared output_dir, memory for the models.

    Raises:
        UserError: on every rank; the message names the rank with the problem.
    """
    output_dir = Path(config.output.output_dir)
    problem = _folder_problem(output_dir)
    needs = None
    if is_main() and MINIMUM_MEMORY is not None:
        needs = resolve_name(MINIMUM_MEMORY)(config, world_size(), device())
    needs = broadcast_object(needs) or MinimumMemory(0, 0)
    free, total = torch.cuda.mem_get_info() if device().type == "cuda" else (0, 0)
    report = ProcessReport(
        rank=rank(),
        host=socket.gethostname(),
        versions=tuple((name, importlib.metadata.version(name)) for name in PACKAGES),
        flags=shared_flags(config),
        folder_problem=problem,
        free_memory=psutil.virtual_memory().available,
        needed_memory=needs.main,
        gpu_memory=total,
        needed_gpu_memory=needs.gpu,
        sampling_memory=needs.drawing,
    )
    check_reports(gather_objects(report), output_dir)
    service_problem = broadcast_object(_service_problem(config) if is_main() else None)
    if service_problem is not None:
        raise UserError(service_problem)
    if needs.gpu and is_main():
        resolve_name(GPU_WARNING)(config, world_size(), free)
    if is_main() and config.output.resume_from_checkpoint is None:  # otherwise a part of it is there
        _warn_of_full_disk(output_dir, needs.disk)


def shared_flags(config: CommonConfig) -> dict[str, str]:
    """Flags and values that all processes must have alike: those that do not say where something is."""
    values = config.flat()
    shared = {}
    for name, flag in flags_of(type(config)).items():
        if not (flag.path or flag.environment or name in MACHINE_FLAGS):
            shared[f"--{name}"] = str(values[name])
    return shared


def check_reports(reports: Sequence[ProcessReport], output_dir: Path) -> None:
    """Raises UserError for the first problem in the reports of all ranks, in order of ranks."""
    first = reports[0]
    processes = Counter(report.host for report in reports)
    for report in reports:
        where = f"rank {report.rank} ({report.host})"
        if report.folder_problem:
            raise UserError(f"--output_dir {output_dir}: {where}: {report.folder_problem}")
        for (name, version), (_, expected) in zip(report.versions, first.versions, strict=True):
            if version != expected:
                raise UserError(
                    f"{where} has {name} {version}, rank 0 ({first.host}) has {expected}: install the same "
                    "requirements.txt on every node."
                )
        for name, expected in first.flags.items():
            value = report.flags[name]
            if value != expected:
                raise UserError(
                    f"{where} has {name} {value}, rank 0 ({first.host}) has {expected}: start every node with the"
                    " same flags."
                )
        available = report.free_memory // processes[report.host]
        if report.needed_memory > available:
            raise UserError(
                f"{where} can use {available / 1e9:.1f} GB of main memory ({processes[report.host]} processes share "
                f"the node), but its models and optimiser states in main memory take "
                f"{report.needed_memory / 1e9:.1f} GB. {_remedy(bool(report.gpu_memory))}"
            )
        if report.needed_gpu_memory > report.gpu_memory:
            raise UserError(
                f"{where} has a GPU of {report.gpu_memory / 1e9:.1f} GB, but its models and optimiser states on the "
                f"GPU take {report.needed_gpu_memory / 1e9:.1f} GB. Add --zero_stage 3, --offload or "
                "--lora_dim, or use more or larger GPUs; `dschat plan` shows what fits."
            )
        if report.needed_gpu_memory + report.sampling_memory > report.gpu_memory:
            raise UserError(
                f"{where} has a GPU of {report.gpu_memory / 1e9:.1f} GB, but needs "
                f"{report.needed_gpu_memory / 1e9:.1f} GB for models and optimiser states and, while responses are "
                f"sampled, {report.sampling_memory / 1e9:.1f} GB for the whole actor, which ZeRO 3 gathers. "
                "Use larger GPUs or a smaller model or, in step 3, --rollout_engine vllm with --vllm_tensor_parallel; "
                "`dschat plan` shows what fits."
            )


def _warn_of_full_disk(output_dir: Path, needed: int) -> None:
    """Warns if the disk has no room for the checkpoints and models that will be there at a time."""
    missing = missing_folders(output_dir)
    existing = missing[-1].parent if missing else output_dir
    free = shutil.disk_usage(existing).free
    if needed > free:
        logger.warning(
            "--output_dir %s: %.1f GB are free, but checkpoints and models take %.1f GB at a time: make room, or lower"
            " --save_total_limit",
            output_dir,
            free / 1e9,
            needed / 1e9,
        )


def _service_problem(config: CommonConfig) -> str | None:
    """Why W&B or the hub would refuse the run, as far as this machine can tell without contacting them."""
    if "wandb" in config.trackers:
        from dschat.run.trackers import wandb_problem

        problem = wandb_problem()
        if problem is not None:
            return problem
    if config.tracking.push_to_hub:
        from dschat.run.hub import push_problem

        return push_problem("--push_to_hub")
    return None


def _remedy(has_gpu: bool) -> str:
    if has_gpu:
        return "Leave out --offload or --offload_reference_model, use more nodes, or free memory."
    return "Use fewer processes per node or --zero_stage 3, --dtype bf16, --lora_dim, a smaller model, or free memory."


def _folder_problem(output_dir: Path) -> str | None:
    """Creates a file on the main process and looks for it on all; a folder that is created for it is removed again."""
    marker = broadcast_object(f".preflight-{uuid.uuid4().hex}")
    problem = None
    created_folders = missing_folders(output_dir)
    if is_main():
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / marker).touch()
        except OSError as error:
            problem = f"cannot be written: {error}"
    main_problem = broadcast_object(problem)
    barrier()
    if main_problem is None and not _is_visible(output_dir / marker):
        problem = (
            "does not see the folder that rank 0 writes to, and would write its parts of checkpoints, including the "
            "one that a stopped run leaves, to another disk; the folder must be on storage that all nodes share, and "
            "--output_dir must be the same everywhere"
        )
    elif main_problem is None and not os.access(output_dir, os.W_OK):
        problem = "cannot be written"
    barrier()
    if is_main():
        if main_problem is None:
            (output_dir / marker).unlink()
        remove_empty(created_folders)
    return problem


def _is_visible(file: Path) -> bool:
    """Whether a file that another node created exists here, possibly after waiting."""
    deadline = time.monotonic() + VISIBLE_WITHIN
    if not file.exists() and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(
            "rank 0 writes to its --output_dir, but its file does not appear in %s here: waiting up to %d s",
            file.parent,
            VISIBLE_WITHIN,
        )
    while not file.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True
