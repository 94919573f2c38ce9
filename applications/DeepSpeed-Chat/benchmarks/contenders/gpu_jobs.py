# SPDX-License-Identifier: Apache-2.0
"""The jobs of gpu.py: step 3 with so many prompts and such micro-batches, and whether the plan says that they fit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from contenders import ours
from contenders.limits import Figures
from contenders.process import ContenderJob
from contenders.work import SIZES, IterationWork, make_files
from dschat.models.pretrained import open_config
from dschat.plan.phases import CUDA_BYTES, Machine
from dschat.plan.plan import make_plan
from dschat.settings.parse import parse
from dschat.settings.ppo import PPOConfig

LENGTHS = {"tiny": (4, 16, 16)}  # tokens: the shortest and the longest prompt, every response
GPU_LENGTHS = (64, 512, 512)
USABLE_MEMORY = 0.93  # what is allocated does not fill all gaps
RECOMPUTED = ["--actor_gradient_checkpointing", "--critic_gradient_checkpointing"]


def work_of(settings: argparse.Namespace, prompts: int, micro_batch: int = 1) -> IterationWork:
    """A rollout of so many prompts."""
    lengths = LENGTHS.get(settings.size, GPU_LENGTHS)
    dtype = "bf16" if settings.device == "cuda" else "fp32"
    return IterationWork(SIZES[settings.size], prompts, min(prompts, micro_batch), *lengths, dtype=dtype)


def job_of(
    settings: argparse.Namespace, work: IterationWork, folder: Path, recomputes: bool, *flags: str
) -> ContenderJob:
    """A job of step 3 with or without gradient checkpointing and with some flags more; its files are written."""
    checkpointing = RECOMPUTED if recomputes else []
    job_flags = [*settings.flags.split(), *checkpointing, *flags]
    job = ContenderJob(work, str(folder / "files"), str(folder), flags=job_flags)
    make_files(work, Path(job.files))
    return job


def job_choices(settings: argparse.Namespace, prompts: int, folder: Path) -> Iterator[ContenderJob]:
    """Jobs in the order of preference: large micro-batches, all of them without gradient checkpointing at first."""
    descending = sorted(settings.micro_batches, reverse=True)
    for recomputes, size in product((False, True), descending):
        yield job_of(settings, work_of(settings, prompts, size), folder, recomputes)


def choice_of(job: ContenderJob) -> Figures:
    """The micro-batch of a job, and whether it recomputes activations."""
    checkpointing = "yes" if RECOMPUTED[0] in job.flags else "no"
    return {"micro_batch": job.work.micro_batch, "checkpointing": checkpointing}


def planned_memory(job: ContenderJob, without: Sequence[str] = ()) -> tuple[int, bool]:
    """Bytes that the plan expects of all phases but some, and whether the GPU has them; a CPU always does."""
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    config = parse(PPOConfig, ours.flags(job))
    plan = make_plan(config, Machine(1, memory), open_config)
    planned = max(phase.total for phase in plan.phases if phase.name not in without)
    return planned, memory is None or planned + CUDA_BYTES <= USABLE_MEMORY * memory


def fits(job: ContenderJob) -> bool:
    """Whether the plan says that a job fits."""
    return planned_memory(job)[1]
