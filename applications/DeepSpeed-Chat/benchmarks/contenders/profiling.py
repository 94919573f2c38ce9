# SPDX-License-Identifier: Apache-2.0
"""Where the time of one iteration of ours went: a trace of torch.profiler, and its time by groups.

Four groups are the work itself: model forward (whatever the wrappers of the models compute, log-probs included, and
the models inside sampling), model backward, sampling (everything else of the rollout engine) and optimiser. Everything
else is listed by item: an operation, or a part of the trainer for the Python between its operations.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

GROUP, PART = "group: ", "part: "
FORWARD, BACKWARD, SAMPLING, OPTIMISER, ELSE = (
    "model forward",
    "model backward",
    "sampling",
    "optimiser",
    "everything else",
)
PARTS = ("collect", "score", "assign_credit", "train")  # methods of the trainer, where it has them
SMALLEST = 0.1  # percent: smaller items are not listed


@contextmanager
def profiled(trainer: Any, folder: Path) -> Iterator[None]:
    """Inside, an iteration is traced. Afterwards the folder holds trace.json (for chrome://tracing) and profile.json.

    Args:
        trainer: a PPOTrainer.
        folder: made if absent.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        for name in PARTS:
            _wrap(stack, type(trainer), name, PART + name)
        _wrap(stack, type(trainer.sample), "__call__", GROUP + SAMPLING)
        _wrap(stack, torch.autograd, "backward", GROUP + BACKWARD)
        _wrap(stack, type(trainer.models.actor), "step", PART + "engine.step")
        for module in _modules(trainer.models):
            _mark(stack, module)
        with profile(activities=activities, acc_events=True) as profiler, record_function(PART + "iterate"):
            yield
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    content = json.dumps(where(profiler.events()), indent=2)
    (folder / "profile.json").write_text(content + "\n", encoding="utf-8")


def _wrap(stack: ExitStack, owner: Any, name: str, label: str) -> None:
    """A function of a class or module records a range until the stack is closed."""
    original: Callable[..., Any] | None = getattr(owner, name, None)
    if original is None:
        return
    function = original

    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    setattr(owner, name, run)
    stack.callback(setattr, owner, name, original)


def _modules(models: Any) -> list[nn.Module]:
    """The wrappers of the models, and inside them what a rollout engine may call directly."""
    engines = [getattr(models, field.name) for field in fields(models)]
    engines += [engine.model for engine in engines if getattr(engine, "model", None) is not None]
    wrappers = [engine.module for engine in engines if isinstance(getattr(engine, "module", None), nn.Module)]
    inner = [part for wrapper in wrappers if (part := getattr(wrapper, "inner", None)) is not None]
    parts = [(getattr(model, model.base_model_prefix), model.get_output_embeddings()) for model in inner]
    found = [*wrappers, *inner, *(part for pair in parts for part in pair if part is not None)]
    return list({id(module): module for module in found}.values())


def _mark(stack: ExitStack, module: nn.Module) -> None:
    """Calls of a module record the range of model forwards."""
    open_ranges: list[record_function] = []

    def enter(*args: Any) -> None:
        open_ranges.append(record_function(GROUP + FORWARD))
        open_ranges[-1].__enter__()

    def leave(*args: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    hooks = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    for hook in hooks:
        stack.callback(hook.remove)


def where(events: Any) -> dict[str, Any]:
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
    percent = {group: 100 * groups[group] / total for group in (FORWARD, BACKWARD, SAMPLING, OPTIMISER, ELSE)}
    listed = {
        group: {name: 100 * time / total for name, time in found.most_common() if 100 * time / total >= SMALLEST}
        for group, found in items.items()
    }
    return {"seconds": total / 1e6, "percent": _rounded(percent), "items": {g: _rounded(x) for g, x in listed.items()}}


def _place(event: Any) -> tuple[str, str]:
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


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 2) for name, number in numbers.items()}
