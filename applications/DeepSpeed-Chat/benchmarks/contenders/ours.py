# SPDX-License-Identifier: Apache-2.0
"""Step 3 as users run it: the main program with its flags, models and data in files; ZeRO 0 unless flags say more.

An iteration is a call of the trainer's `iterate`, and its phases are those of the trainer's own clock. The trainer
decides what a phase includes: with one update per rollout, for instance, log-probs and values may come from training.

Beside the phases, time is recorded by kind of work: model forward (log-probs included, also inside sampling), model
backward, sampling (everything else of the rollout engine), optimizer, and macro actions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec

import torch
from torch import nn
from transformers import GemmaForCausalLM

from contenders.process import ContenderJob, Meter, read_job
from contenders.work import FIRST_WORD, PAD
from dschat.models.engines import TrainedPolicy
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.quickstart.subcommands import as_arguments
from dschat.rollouts.engine import Generation, ResponseSampler, assemble, pad_prompts
from dschat.rollouts.generate import ContinuousEngine
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.termination import TerminationCondition
from dschat.run.distributed import device
from dschat.training.iteration import Clock
from dschat.training.ppo.algorithm import PPO
from dschat.training.ppo.collect import ActorSampler
from harness import run_step
from macro_actions.estimators import ESTIMATORS

STEP = "step3_rlhf_finetuning"
MACRO_ACTIONS = "macro actions"  # termination condition, segments, pooling, GAE, back to tokens
P = ParamSpec("P")
Iterate = Callable[Concatenate[PPO, P], dict[str, float]]


def main() -> None:
    """Runs step 3; the meter ends the process."""
    job, meter = read_job()
    ESTIMATORS["gae"] = meter.inside(MACRO_ACTIONS, ESTIMATORS["gae"])
    for owner, name, part in (
        (TerminationCondition, "__call__", MACRO_ACTIONS),
        (PolicyModel, "forward", "model forward"),
        (ScalarModel, "forward", "model forward"),
        (GemmaForCausalLM, "forward", "model forward"),
        (torch.autograd, "backward", "model backward"),
        (ActorSampler, "sample", "sampling"),
        (torch.optim.AdamW, "step", "optimiser"),
    ):
        setattr(owner, name, meter.inside(part, getattr(owner, name)))
    setattr(PPO, "iterate", measured(PPO.iterate, job, meter))  # noqa: B010  # a method for mypy
    setattr(Clock, "record", booking(Clock.record, meter))  # noqa: B010
    if job.random_responses:
        setattr(ContinuousEngine, "session", random_session)  # noqa: B010
    run_step(STEP, flags(job))


def flags(job: ContenderJob) -> list[str]:
    """The command line of step 3 for this work; the job's own flags come last and override the others."""
    files = Path(job.files)
    work = job.work
    options = {
        "data_path": files / "prompts",
        "data_split": "0,0,1",
        "output_dir": Path(job.folder) / "run",
        "actor_model_name_or_path": files / "actor",
        "critic_model_name_or_path": files / "reward",
        "per_device_generation_batch_size": work.batch,
        "per_device_training_batch_size": work.micro_batch,
        "global_batch_size": work.update_prompts,
        "max_prompt_seq_len": work.longest_prompt,
        "max_answer_seq_len": work.longest_response,
        "num_train_epochs": 10**6,  # a rollout each, of the same prompts; the meter ends it
        "lr_scheduler_type": "constant",
        "actor_learning_rate": 1e-6,
        "critic_learning_rate": 1e-6,
        "dtype": work.dtype,
    }
    return [*as_arguments({f"--{name}": value for name, value in options.items()}), "--no_self_checks", *job.flags]


@contextmanager
def random_session(engine: ContinuousEngine, actor: TrainedPolicy) -> Iterator[ResponseSampler]:
    """Samples words uniformly, at no cost; every response has the full length."""

    def draw(
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        limits: Sequence[int] | None = None,
    ) -> Generation:
        rows = len(prompts)
        size = (rows, sampling.max_new_tokens)
        tokens = torch.randint(FIRST_WORD, actor.module.vocab_size, size, device=device())
        rollout = assemble(pad_prompts(prompts, PAD, device()), tokens, sampling, limits)
        return Generation(rollout, None, bad_rows=torch.zeros(rows, dtype=torch.bool, device=device()))

    yield draw


def measured(iterate: Iterate[P], job: ContenderJob, meter: Meter) -> Iterate[P]:
    """The trainer's `iterate`, measured."""
    number = 0

    def run(trainer: PPO, *args: P.args, **kwargs: P.kwargs) -> dict[str, float]:
        nonlocal number
        if number == 0:
            count_positions(trainer.models.reference.module.inner, "scoring", meter, training=False)
            count_positions(trainer.models.actor.module.inner, "training", meter, training=True)
        meter.begin()
        metrics = iterate(trainer, *args, **kwargs)
        number += 1
        meter.end(metrics["response/length"] * job.work.batch)
        return metrics

    return run


def count_positions(causal_lm: nn.Module, name: str, meter: Meter, training: bool) -> None:
    """Counts the positions, padding included, that a model computes outside of sampling, with or without gradients."""

    def count(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        if torch.is_grad_enabled() == training:
            ids = kwargs.get("input_ids", args[0] if args else None)
            if ids is None:
                ids = kwargs["inputs_embeds"][..., 0]
            meter.now.counts[name] += ids.numel()

    base = causal_lm.get_submodule(str(causal_lm.base_model_prefix))
    base.register_forward_pre_hook(count, with_kwargs=True)


def booking(record: Callable[[Clock, str], None], meter: Meter) -> Callable[[Clock, str], None]:
    """The trainer's `Clock.record`, which also notifies the meter."""

    def run(clock: Clock, name: str) -> None:
        record(clock, name)
        meter.lap(name)

    return run


if __name__ == "__main__":
    main()
