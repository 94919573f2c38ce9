# SPDX-License-Identifier: Apache-2.0
"""Step 3 as users run it: the main program with its flags, models and data in files; ZeRO 0 unless flags say more.

An iteration is a call of the trainer's `iterate`, and its phases are those of the trainer's own clock. The trainer
decides what a phase includes: with one update per rollout, for instance, log-probs and values may come from training.

Beside the phases, time is recorded by kind of work: model forward (log-probs included, also inside sampling), model
backward, sampling (everything else of the rollout engine), optimiser, and macro actions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import GemmaForCausalLM

from contenders.meter import Meter
from contenders.process import ContenderJob, read_job
from contenders.work import FIRST_WORD, PAD
from dschat.models.engines import TrainedPolicy
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.quickstart.subcommands import as_arguments
from dschat.rollouts.continuous import ContinuousEngine
from dschat.rollouts.engine import Generation, ResponseSampler, assemble, pad_prompts
from dschat.rollouts.sampling import Sampling
from dschat.rollouts.termination import TerminationCondition
from dschat.run.distributed import device
from dschat.training.iteration import Clock
from dschat.training.loop import Work
from dschat.training.ppo.algorithm import PPO
from dschat.training.ppo.collect import ActorSampler
from harness import run_step
from macro_actions.estimators import ESTIMATORS

STEP = "step3_rlhf_finetuning"
MACRO_ACTIONS = "macro actions"  # termination condition, segments, pooling, GAE, back to tokens
Iterate = Callable[[PPO, Work, int], dict[str, float]]


def main() -> None:
    """Runs step 3; the meter ends the process."""
    job, meter = read_job()
    ESTIMATORS["gae"] = meter.measured(MACRO_ACTIONS, ESTIMATORS["gae"])
    for owner, name, part in (
        (TerminationCondition, "__call__", MACRO_ACTIONS),
        (PolicyModel, "forward", "model forward"),
        (ScalarModel, "forward", "model forward"),
        (GemmaForCausalLM, "forward", "model forward"),
        (torch.autograd, "backward", "model backward"),
        (ActorSampler, "sample", "sampling"),
        (torch.optim.AdamW, "step", "optimiser"),
    ):
        setattr(owner, name, meter.measured(part, getattr(owner, name)))
    PPO.iterate = with_measurement(PPO.iterate, job, meter)  # type: ignore[method-assign, assignment]
    Clock.record = with_laps(Clock.record, meter)  # type: ignore[method-assign, assignment]
    if job.random_responses:
        ContinuousEngine.session = uniform_session  # type: ignore[method-assign, assignment]
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
def uniform_session(engine: ContinuousEngine, actor: TrainedPolicy, same_weights: bool) -> Iterator[ResponseSampler]:
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


def with_measurement(iterate: Iterate, job: ContenderJob, meter: Meter) -> Iterate:
    """`PPO.iterate` between the beginning and the end of a measured iteration."""
    number = 0

    def measured_iterate(trainer: PPO, work: Work, iteration: int) -> dict[str, float]:
        nonlocal number
        if number == 0:
            count_positions(trainer.models.reference.module.inner, "scoring", meter, with_gradients=False)
            count_positions(trainer.models.actor.module.inner, "training", meter, with_gradients=True)
        meter.begin()
        metrics = iterate(trainer, work, iteration)
        number += 1
        meter.end(metrics["response/length"] * job.work.batch)
        return metrics

    return measured_iterate


def count_positions(causal_lm: nn.Module, name: str, meter: Meter, with_gradients: bool) -> None:
    """Counts positions, padding included, that a model computes outside of sampling, with gradients or without."""

    def count(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        if torch.is_grad_enabled() == with_gradients:
            ids = kwargs.get("input_ids", args[0] if args else None)
            if ids is None:
                ids = kwargs["inputs_embeds"][..., 0]
            meter.figures.counts[name] += ids.numel()

    base = causal_lm.get_submodule(str(causal_lm.base_model_prefix))
    base.register_forward_pre_hook(count, with_kwargs=True)


def with_laps(record: Callable[[Clock, str], None], meter: Meter) -> Callable[[Clock, str], None]:
    """`Clock.record`, which also ends a lap of the meter."""

    def recorded_lap(clock: Clock, name: str) -> None:
        record(clock, name)
        meter.lap(name)

    return recorded_lap


if __name__ == "__main__":
    main()
