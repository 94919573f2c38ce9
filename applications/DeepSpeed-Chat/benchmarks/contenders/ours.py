# SPDX-License-Identifier: Apache-2.0
"""Step 3 as it is run: the main program itself, its flags, models and data read from files, ZeRO 0 unless told so.

An iteration is a call of the trainer's `iterate`; its phases are those of the trainer's own clock. What a phase holds
is the trainer's business: with one update per rollout, for instance, log-probs and values may come from training.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from contenders.job import Job, read_job
from contenders.meter import Meter
from contenders.profiling import profiled

MAIN = Path(__file__).resolve().parents[2] / "training" / "step3_rlhf_finetuning" / "main.py"
MACRO_ACTIONS = "macro actions"  # termination condition, segments, pooling, GAE, back to tokens
PROFILED = 1  # number of the iteration of which a trace is written; the first warms up


def main() -> None:
    """Runs step 3; the meter ends the process."""
    job, meter = read_job()
    sys.argv = [str(MAIN), *flags(job)]
    from dschat.rl.estimators import ESTIMATORS

    ESTIMATORS["gae"] = meter.inside(MACRO_ACTIONS, ESTIMATORS["gae"])
    from dschat.trainers.ppo.trainer import PPOTrainer

    from dschat.conditions.termination import TerminationCondition
    from dschat.config.ppo import PPOConfig
    from dschat.main import run_main
    from dschat.trainers.iteration import Clock

    patched: Any = PPOTrainer
    patched.iterate = measured(PPOTrainer.iterate, job, meter)
    patched = TerminationCondition
    patched.__call__ = meter.inside(MACRO_ACTIONS, TerminationCondition.__call__)
    patched = Clock
    patched.lap = booking(Clock.lap, meter)
    sys.exit(run_main("ppo", PPOConfig, step3().train))


def flags(job: Job) -> list[str]:
    """The command line of step 3 for this work; the job's own flags come last, and hold."""
    files, work = Path(job.files), job.work
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    options = {
        "data_path": files / "prompts",
        "data_split": "0,0,1",
        "output_dir": Path(job.folder) / "run",
        "actor_model_name_or_path": files / "actor",
        "critic_model_name_or_path": files / "reward",
        "per_device_generation_batch_size": work.batch // processes,
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
    pairs = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*pairs, "--no_self_checks", *job.flags]


def step3() -> ModuleType:
    """The main program of step 3, as a module."""
    spec = importlib.util.spec_from_file_location("step3_main", MAIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(iterate: Callable[..., dict[str, float]], job: Job, meter: Meter) -> Callable[..., dict[str, float]]:
    """The trainer's `iterate`, measured."""
    number = 0

    def run(trainer: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        nonlocal number
        if number == 0:
            count_positions(trainer.models.reference.module.inner, "scoring", meter, training=False)
            count_positions(trainer.models.actor.module.inner, "training", meter, training=True)
        meter.begin()
        with ExitStack() as stack:
            if job.profile is not None and number == PROFILED:
                stack.enter_context(profiled(trainer, Path(job.profile)))
            metrics = iterate(trainer, *args, **kwargs)
        number += 1
        meter.end(metrics["response/length"] * job.work.batch)
        return metrics

    return run


def count_positions(causal_lm: Any, name: str, meter: Meter, training: bool) -> None:
    """Books the positions, padding included, that a model computes outside of sampling.

    Args:
        causal_lm: the Hugging Face model.
        name: that they are booked under.
        meter: of this process.
        training: those of forwards with gradients, or those without.
    """

    def count(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() == training:
            ids = kwargs.get("input_ids", args[0] if args else None)
            meter.count(name, ids.numel() if ids is not None else kwargs["inputs_embeds"][..., 0].numel())

    getattr(causal_lm, causal_lm.base_model_prefix).register_forward_pre_hook(count, with_kwargs=True)


def booking(lap: Callable[..., None], meter: Meter) -> Callable[..., None]:
    """The trainer's `Clock.lap`, which tells the meter, too."""

    def run(clock: Any, name: str) -> None:
        lap(clock, name)
        meter.lap(name)

    return run


if __name__ == "__main__":
    main()
