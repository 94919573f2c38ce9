# SPDX-License-Identifier: Apache-2.0
"""Annotates the parts of step 3 and of a decoding step, and writes a profiler's trace of few of them.

Few kernels are profiled: a profile of a whole iteration with its decoding takes minutes to be written. The trace goes
to a file without passing through Python objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from contenders.kernels import HEAD_RANGE, OPTIMISER_PART, PART, read_kernels, times_of_parts, with_decoding_heads
from contenders.limits import Figures, sampler_of
from contenders.work import IterationWork, make_actor, prompt_ids
from dschat.engine.engine import Engine
from dschat.models import policy
from dschat.models.compiled import compile_layers
from dschat.models.policy import PolicyModel
from dschat.rollouts.static import StaticDecoder
from dschat.training.ppo.algorithm import PPO

WARMUP_ITERATIONS = 2  # the first one compiles, and the profiler is started in the second
DECODING_PART = "decoding step"
PROFILED_STEPS = 4
P = ParamSpec("P")
R = TypeVar("R")
AnyEngine = Engine[PolicyModel]


def profile_iteration(trace: Path) -> None:
    """Has the third iteration of this process's PPO profiled, and its parts annotated."""
    head = annotated(policy.token_logprobs, lambda *args, **kwargs: HEAD_RANGE)
    setattr(policy, "token_logprobs", head)  # noqa: B010  # a function for mypy
    for name, part_of in (("__call__", forward_part), ("backward", backward_part), ("step", step_part)):
        setattr(Engine, name, annotated(getattr(Engine, name), part_of))
    profiler = profiler_of(trace, wait=WARMUP_ITERATIONS - 1, active=1)
    profiler.start()
    setattr(PPO, "iterate", stepping(PPO.iterate, profiler))  # noqa: B010


def profile_decoding(work: IterationWork, device: str, is_compiled: bool, trace: Path) -> list[Figures]:
    """Profiles decoding steps in the middle of a rollout, which CUDA graphs replay: where their time goes.

    Args:
        work: its batch is the number of rows.
        device: cuda or cpu.
        is_compiled: whether layers and sampler are compiled.
        trace: where the profiler's trace goes.
    """
    start_tracing()
    with torch.device(device):
        model = make_actor(work).eval()
    if is_compiled:
        compile_layers(model)
    sample = sampler_of("compiled" if is_compiled else "static", model, prompt_ids(work), lambda launches: None)
    sample(work.longest_response)  # captures the graphs
    profiler = profiler_of(trace, wait=work.longest_response // 3, active=PROFILED_STEPS)
    step = annotated(StaticDecoder.step, lambda *args: PART + DECODING_PART)
    setattr(StaticDecoder, "step", stepping(step, profiler))  # noqa: B010
    profiler.start()
    sample(work.longest_response)
    kernels = []
    for kernel in read_kernels(trace):
        if kernel.part == DECODING_PART:
            kernels.append(kernel)
    times = times_of_parts(with_decoding_heads(kernels, DECODING_PART))
    rows: list[Figures] = []
    for part, part_times in times.items():
        label: Figures = {"part": part}
        rows.append(label | part_times.row())
    return rows


def start_tracing() -> None:
    """Has the GPU's tracing library loaded from now on, so that graphs are captured and replayed under it.

    The variables are those that torch.profiler sets for graphs of its own compiler: a graph must not be replayed after
    the library was taken down.
    """
    os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    with profile(activities=activities()):
        torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")


def stepping(function: Callable[P, R], profiler: profile) -> Callable[P, R]:
    """A function after each of whose calls the profiler's next step begins."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        profiler.step()
        return result

    return run


def annotated(function: Callable[P, R], label: Callable[P, str | None]) -> Callable[P, R]:
    """A function whose calls are ranges of a trace; None: no range."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        name = label(*args, **kwargs)
        if name is None:
            return function(*args, **kwargs)
        with record_function(name):
            return function(*args, **kwargs)

    return run


def forward_part(engine: AnyEngine, *args: object, **kwargs: object) -> str:
    """The part that a forward pass belongs to."""
    return PART + (f"{role_of(engine)} forward" if torch.is_grad_enabled() else "scoring")


def backward_part(engine: AnyEngine, loss: Tensor) -> str:
    """The part that a backward pass belongs to."""
    return f"{PART}{role_of(engine)} backward"


def step_part(engine: AnyEngine) -> str | None:
    """The optimiser's step, at the last micro-batch of an update; None: at the others."""
    return PART + OPTIMISER_PART if engine._engine.is_gradient_accumulation_boundary() else None


def role_of(engine: AnyEngine) -> str:
    """Which of the trained models an engine has."""
    return "actor" if isinstance(engine.module, PolicyModel) else "critic"


def profiler_of(trace: Path, wait: int, active: int) -> profile:
    """A profiler that waits, warms up for one step, and writes a file after the active steps."""
    return profile(
        activities=activities(),
        schedule=schedule(wait=wait, warmup=1, active=active, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
        record_shapes=False,
        with_stack=False,
    )


def activities() -> list[ProfilerActivity]:
    """What is traced: the host, and the GPU where there is one."""
    if torch.cuda.is_available():
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    return [ProfilerActivity.CPU]
