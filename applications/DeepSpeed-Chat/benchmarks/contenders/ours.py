# SPDX-License-Identifier: Apache-2.0
"""Step 3 as it is run: the main program itself, its flags, models and data read from files, ZeRO 0 unless told so.

An iteration is a call of the trainer's `iterate`; its phases are those of the trainer's own clock. What a phase holds
is the trainer's business: with one update per rollout, for instance, log-probs and values may come from training.

A trace of an iteration says where its time went. Four groups are the work itself: model forward (log-probs included,
also inside sampling), model backward, sampling (everything else of the rollout engine) and optimiser. Everything else
is listed by operation; `Python` is what lies between its operations.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from contenders.process import Job, Meter, read_job
from dschat.common.launch import as_arguments
from dschat.conditions.termination import TerminationCondition
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.rl.estimators import ESTIMATORS
from dschat.trainers.iteration import Clock
from dschat.trainers.ppo import PPO
from harness import run_step

STEP = "step3_rlhf_finetuning"
MACRO_ACTIONS = "macro actions"  # termination condition, segments, pooling, GAE, back to tokens
PROFILED = 1  # number of the iteration of which a trace is written; the first warms up
GROUPS = ("model forward", "model backward", "sampling", "optimiser", "everything else")
FORWARD, BACKWARD, SAMPLING, OPTIMISER, ELSE = GROUPS
SMALLEST = 0.1  # percent: smaller items are not listed
P = ParamSpec("P")
Iterate = Callable[Concatenate[PPO, P], dict[str, float]]


def main() -> None:
    """Runs step 3; the meter ends the process."""
    job, meter = read_job()
    ESTIMATORS["gae"] = meter.inside(MACRO_ACTIONS, ESTIMATORS["gae"])
    for owner, name, method in (
        (PPO, "iterate", measured(PPO.iterate, job, meter)),
        (TerminationCondition, "__call__", meter.inside(MACRO_ACTIONS, TerminationCondition.__call__)),
        (Clock, "lap", booking(Clock.lap, meter)),
    ):
        setattr(owner, name, method)
    run_step(STEP, flags(job))


def flags(job: Job) -> list[str]:
    """The command line of step 3 for this work; the job's own flags come last, and hold."""
    files, work = Path(job.files), job.work
    options = {
        "data_path": files / "prompts",
        "data_split": "0,0,1",
        "output_dir": Path(job.folder) / "run",
        "actor_model_name_or_path": files / "actor",
        "critic_model_name_or_path": files / "reward",
        "per_device_generation_batch_size": work.batch // job.processes,
        "per_device_training_batch_size": work.micro_batch,
        "global_batch_size": work.update,
        "max_prompt_seq_len": work.longest_prompt,
        "max_answer_seq_len": work.response,
        "num_train_epochs": 10**6,  # a rollout each, of the same prompts; the meter ends it
        "lr_scheduler_type": "constant",
        "actor_learning_rate": 1e-6,
        "critic_learning_rate": 1e-6,
        "dtype": work.dtype,
    }
    return [*as_arguments({f"--{name}": value for name, value in options.items()}), "--no_self_checks", *job.flags]


def measured(iterate: Iterate[P], job: Job, meter: Meter) -> Iterate[P]:
    """The trainer's `iterate`, measured."""
    number = 0

    def run(trainer: PPO, *args: P.args, **kwargs: P.kwargs) -> dict[str, float]:
        nonlocal number
        if number == 0:
            count_positions(trainer.models.reference.module.inner, "scoring", meter, training=False)
            count_positions(trainer.models.actor.module.inner, "training", meter, training=True)
        meter.begin()
        traced = job.profile is not None and number == PROFILED
        with profiled(trainer, Path(job.profile or "")) if traced else nullcontext():
            metrics = iterate(trainer, *args, **kwargs)
        number += 1
        meter.end(metrics["response/length"] * job.work.batch)
        return metrics

    return run


def count_positions(causal_lm: nn.Module, name: str, meter: Meter, training: bool) -> None:
    """Books the positions, padding included, that a model computes outside of sampling, with or without gradients."""

    def count(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        if torch.is_grad_enabled() == training:
            ids = kwargs.get("input_ids", args[0] if args else None)
            meter.now.counts[name] += ids.numel() if ids is not None else kwargs["inputs_embeds"][..., 0].numel()

    base = causal_lm.get_submodule(str(causal_lm.base_model_prefix))
    base.register_forward_pre_hook(count, with_kwargs=True)


def booking(lap: Callable[[Clock, str], None], meter: Meter) -> Callable[[Clock, str], None]:
    """The trainer's `Clock.lap`, which tells the meter, too."""

    def run(clock: Clock, name: str) -> None:
        lap(clock, name)
        meter.lap(name)

    return run


@contextmanager
def profiled(trainer: PPO, folder: Path) -> Iterator[None]:
    """Traces an iteration; afterwards the folder holds trace.json (for chrome://tracing) and profile.json."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with ExitStack() as stack:
        for model in (PolicyModel, ScalarModel, type(trainer.models.actor.module.inner)):
            _mark(stack, model, "forward", FORWARD)
        _mark(stack, type(trainer.sample), "__call__", SAMPLING)
        _mark(stack, torch.autograd, "backward", BACKWARD)
        with profile(activities=activities, acc_events=True) as profiler, record_function("Python"):
            yield
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    found = shares([event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CPU])
    (folder / "profile.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _mark(stack: ExitStack, owner: object, name: str, group: str) -> None:
    """A function of a class or module records a range until the stack is closed."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(record_function(group)(original)))
    stack.callback(setattr, owner, name, original)


def shares(events: list[FunctionEvent]) -> dict[str, dict[str, float]]:
    """Percent of the traced time by group, and of everything else by operation."""
    total = sum(event.self_cpu_time_total for event in events)
    groups, items = dict.fromkeys(GROUPS, 0.0), defaultdict[str, float](float)
    for event in events:
        group = group_of(event)
        groups[group] += 100 * event.self_cpu_time_total / total
        if group == ELSE:
            items[event.name] += 100 * event.self_cpu_time_total / total
    largest = sorted(items.items(), key=lambda item: -item[1])
    return {
        "percent": {group: round(percent, 2) for group, percent in groups.items()},
        "items": {name: round(percent, 2) for name, percent in largest if percent >= SMALLEST},
    }


def group_of(event: FunctionEvent) -> str:
    """The innermost group that an event is part of."""
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith("Optimizer.step#"):
            return OPTIMISER
        if above.name in GROUPS:
            return above.name
        above = above.cpu_parent
    return ELSE


if __name__ == "__main__":
    main()
