# SPDX-License-Identifier: Apache-2.0
"""Where the time of one iteration of ours went: a trace of torch.profiler, and its time by groups.

Four groups are the work itself: model forward (whatever the wrappers of the models compute, log-probs included, and
the models inside sampling), model backward, sampling (everything else of the rollout engine) and optimiser. Everything
else is listed by item: an operation, or a part of the trainer for the Python between its operations.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.profiler_util import EventList, FunctionEvent
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
    """Inside, an iteration is traced. Afterwards the folder holds trace.json (for chrome://tracing) and profile.json.

    Args:
        trainer: of step 3.
        folder: made if absent.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        for name in PARTS:
            _wrap(stack, type(trainer), name, PART + name)
        _wrap(stack, type(trainer.sample), "__call__", GROUP + SAMPLING)
        _wrap(stack, torch.autograd, "backward", GROUP + BACKWARD)
        _wrap(stack, type(trainer.models.actor), "step", PART + "engine.step")
        for module in _modules([getattr(trainer.models, field.name) for field in fields(trainer.models)]):
            _mark(stack, module)
        with profile(activities=activities, acc_events=True) as profiler, record_function(PART + "iterate"):
            yield
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = profiler.events()
    assert events is not None
    (folder / "profile.json").write_text(json.dumps(where(events), indent=2) + "\n", encoding="utf-8")


def _wrap(stack: ExitStack, owner: object, name: str, label: str) -> None:
    """A function of a class or module records a range until the stack is closed."""
    original = getattr(owner, name)

    def run(*args: object, **kwargs: object) -> object:
        with record_function(label):
            return original(*args, **kwargs)

    setattr(owner, name, run)
    stack.callback(setattr, owner, name, original)


def _modules(parts: list[object]) -> list[nn.Module]:
    """The wrappers of the models, and inside them what a rollout engine may call directly."""
    engines = [getattr(part, "model", None) or part for part in parts]
    found = [wrapper for engine in engines if isinstance(wrapper := getattr(engine, "module", None), nn.Module)]
    for model in [wrapper.inner for wrapper in found]:
        assert isinstance(model, nn.Module)
        inner = (model, getattr(model, str(model.base_model_prefix)), model.get_output_embeddings())  # type: ignore[operator]
        found += [part for part in inner if part is not None]
    return list(dict.fromkeys(found))


def _mark(stack: ExitStack, module: nn.Module) -> None:
    """Calls of a module record the range of model forwards."""
    open_ranges: list[record_function] = []

    def enter(*args: object) -> None:
        open_ranges.append(record_function(GROUP + FORWARD))
        open_ranges[-1].__enter__()

    def leave(*args: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)


def where(events: EventList) -> dict[str, object]:
    """Percent of the iteration by group; of the rest, and of sampling, by item.

    Args:
        events: of a finished profile.
    """
    groups: Counter[str] = Counter()
    items: dict[str, Counter[str]] = {SAMPLING: Counter(), ELSE: Counter()}
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        group, part = _place(event)
        groups[group] += event.self_cpu_time_total
        if group in items:
            name = "Python" if event.name.startswith((GROUP, PART)) else event.name
            items[group][f"{part}: {name}" if group == ELSE else name] += event.self_cpu_time_total
    total = sum(groups.values())

    def percent(found: Mapping[str, float]) -> dict[str, float]:
        return {name: round(100 * time / total, 2) for name, time in found.items()}

    listed = {group: percent(dict(found.most_common())) for group, found in items.items()}
    return {
        "seconds": total / 1e6,
        "percent": percent({group: groups[group] for group in GROUPS}),
        "items": {group: {name: x for name, x in found.items() if x >= SMALLEST} for group, found in listed.items()},
    }


def _place(event: FunctionEvent) -> tuple[str, str]:
    """An event's group, and the innermost part of the trainer that it belongs to."""
    part, above = "", event
    while above is not None:
        if above.name.startswith(GROUP):
            return above.name.removeprefix(GROUP), part
        if above.name.startswith("Optimizer.step#"):
            return OPTIMISER, part
        if above.name.startswith(PART) and not part:
            part = above.name.removeprefix(PART)
        above = above.cpu_parent
    return ELSE, part
