# SPDX-License-Identifier: Apache-2.0
"""Where the time of one iteration of ours went: a trace of torch.profiler, and its time by groups.

Four groups are the work itself: model forward (the outermost module that is called, log-probs included, and the models
inside sampling), model backward, sampling (everything else of the rollout engine) and optimiser. Everything else is
listed by item: an operation, or a part of the trainer for the Python between its operations.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from dschat.trainers.ppo.trainer import PPOTrainer

GROUP, PART = "group: ", "part: "
GROUPS = ("model forward", "model backward", "sampling", "optimiser", "everything else")
FORWARD, BACKWARD, SAMPLING, OPTIMISER, ELSE = GROUPS
PARTS = ("collect", "score", "credit", "train")  # methods of the trainer
SMALLEST = 0.1  # percent: smaller items are not listed


@contextmanager
def profiled(trainer: "PPOTrainer", folder: Path) -> Iterator[None]:
    """Traces an iteration; afterwards the folder holds trace.json (for chrome://tracing) and profile.json."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        _mark_forwards(stack)
        for name in PARTS:
            _mark(stack, type(trainer), name, PART + name)
        _mark(stack, type(trainer.sample), "__call__", GROUP + SAMPLING)
        _mark(stack, torch.autograd, "backward", GROUP + BACKWARD)
        _mark(stack, type(trainer.models.actor), "step", PART + "engine.step")
        with profile(activities=activities, acc_events=True) as profiler, record_function(PART + "iterate"):
            yield
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    found = shares([event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CPU])
    (folder / "profile.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _mark(stack: ExitStack, owner: object, name: str, label: str) -> None:
    """A function of a class or module records a range until the stack is closed."""
    original = getattr(owner, name)

    def run(*args: object, **kwargs: object) -> object:
        with record_function(label):
            return original(*args, **kwargs)

    setattr(owner, name, run)
    stack.callback(setattr, owner, name, original)


def _mark_forwards(stack: ExitStack) -> None:
    """Modules record a range when they are called outside of another one; DeepSpeed's engine is no part of a model."""
    under_way: list[record_function | None] = []

    def enter(module: nn.Module, *rest: object) -> None:
        inner = any(under_way) or type(module).__module__.startswith("deepspeed")
        under_way.append(None if inner else record_function(GROUP + FORWARD).__enter__())

    def leave(*rest: object) -> None:
        if (marked := under_way.pop()) is not None:
            marked.__exit__(None, None, None)

    stack.callback(register_module_forward_pre_hook(enter).remove)
    stack.callback(register_module_forward_hook(leave, always_call=True).remove)


def shares(events: list[FunctionEvent]) -> dict[str, dict[str, float]]:
    """Percent of the traced time by group, and of everything else by item."""
    total = sum(event.self_cpu_time_total for event in events)
    groups, items = dict.fromkeys(GROUPS, 0.0), defaultdict[str, float](float)
    for event in events:
        group, part = _place(event)
        groups[group] += 100 * event.self_cpu_time_total / total
        if group == ELSE:
            name = "Python" if event.name.startswith((GROUP, PART)) else event.name
            items[f"{part}: {name}"] += 100 * event.self_cpu_time_total / total
    largest = sorted(items.items(), key=lambda item: -item[1])
    return {
        "percent": {group: round(percent, 2) for group, percent in groups.items()},
        "items": {name: round(percent, 2) for name, percent in largest if percent >= SMALLEST},
    }


def _place(event: FunctionEvent) -> tuple[str, str]:
    """An event's group, and the innermost part of the trainer that it belongs to."""
    part = ""
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith(GROUP):
            return above.name.removeprefix(GROUP), part
        if above.name.startswith("Optimizer.step#"):
            return OPTIMISER, part
        if above.name.startswith(PART) and not part:
            part = above.name.removeprefix(PART)
        above = above.cpu_parent
    return ELSE, part
