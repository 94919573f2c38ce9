# SPDX-License-Identifier: Apache-2.0
"""A PPO trainer in which one process gets a NaN at a chosen place, and one in which it gets empty responses only."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dschat.base.errors import UserError
from dschat.run.distributed import rank, world_size
from dschat.training.selfcheck import check_policy
from factories import (
    PAD,
    largest_difference,
    make_causal_lm,
    make_classifier,
    make_prompt,
    pad_rows,
    ppo_config,
    ppo_loop,
    ragged_rows,
    random_ids,
    whole_state,
)
from recorded_updates import Case, engine_for, supervised_trainer, supervised_update

ROLLOUT = 8  # prompts on all processes
UPDATES = 2  # of a rollout, by two PPO epochs


class Reward:
    """Lengths; NaN for the last response while `broken`."""

    broken = False

    def __call__(self, prompts: Any, responses: Any, rows: Any) -> list[float]:
        scores = [float(len(response)) for response in responses]
        return [*scores[:-1], math.nan] if self.broken else scores


def trainer_for(folder: Path, zero_stage: int = 0, prompt_lengths: tuple[int, ...] = (2, 3, 4), **flags: Any) -> Any:
    """A PPO trainer with rollouts of 8 prompts, two micro-batches an update and two PPO epochs."""
    share = ROLLOUT // world_size()
    flags = {"eval_iters": 0, "max_answer_seq_len": 6, "ppo_epochs": UPDATES} | flags
    sizes = {"per_device_generation_batch_size": share, "per_device_training_batch_size": share // 2}
    config = ppo_config(folder, gradient_accumulation_steps=2, **sizes, **flags)
    models = {"reference": make_causal_lm(seed=1), "critic": make_classifier(seed=2)}
    options = {"zero_stage": zero_stage, "schedule": "linear", "total_updates": 20}
    lengths = [prompt_lengths[i % len(prompt_lengths)] for i in range(4 * ROLLOUT)]
    prompts = [make_prompt([1, *random_ids(n - 1, i)], f"p{i}", i) for i, n in enumerate(lengths)]
    return ppo_loop(config, Reward(), prompts, prompts[:1], **models, **options)


def batches(number: int) -> list[list[int]]:
    """This process's prompts of a rollout, in one generation batch."""
    return [list(range(number * ROLLOUT, (number + 1) * ROLLOUT))[rank() :: world_size()]]


@contextmanager
def _hook(module: Any, spoil: Callable[[Any], Any], in_training: bool = False) -> Iterator[None]:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return spoil(output) if module.training or not in_training else output

    handle = module.register_forward_hook(hook)
    yield
    handle.remove()


@contextmanager
def _gradient(engine: Any) -> Iterator[None]:
    weight = next(p for name, p in engine.module.named_parameters() if "up_proj" in name)
    handle = weight.register_hook(lambda gradient: gradient * math.nan)
    yield
    handle.remove()


@contextmanager
def _scores(trainer: Any) -> Iterator[None]:
    reward = trainer.algorithm.models.reward._function
    reward.broken = True
    yield
    reward.broken = False


@contextmanager
def _advantages(trainer: Any) -> Iterator[None]:
    real = trainer.algorithm.credit

    def spoiled(*given: Any, **named: Any) -> Any:
        batch = real(*given, **named)
        return replace(batch, advantages=batch.advantages * math.nan)

    trainer.algorithm.credit = spoiled
    yield
    trainer.algorithm.credit = real


# What the message must say → how the number comes about.
PLACES: dict[str, Callable[[Any], Any]] = {
    "logits": lambda trainer: _hook(
        trainer.algorithm.models.actor.module.output_head, lambda logits: logits * math.nan
    ),
    "values": lambda trainer: _hook(trainer.algorithm.models.critic.module, lambda values: values * math.nan),
    "scores": _scores,
    "advantages": _advantages,
    "gradients of the actor": lambda trainer: _gradient(trainer.algorithm.models.actor),
    "gradients of the critic": lambda trainer: _gradient(trainer.algorithm.models.critic),
    "losses of the actor": lambda trainer: _hook(
        trainer.algorithm.models.actor.module, lambda pair: (pair[0] * math.nan, pair[1])
    ),
    "losses of the critic": lambda trainer: _hook(
        trainer.algorithm.models.critic.module, lambda v: v * math.inf, True
    ),
}
# Where an update's own forward passes give log-probs and values, they are named.
LATE_PLACES = {"logprobs": PLACES["losses of the actor"]}


@contextmanager
def spoiled(trainer: Any, place: str, where: int) -> Iterator[None]:
    """Inside, one process gets numbers that are not finite."""
    if rank() != where:
        yield
        return
    with (PLACES | LATE_PLACES)[place](trainer):
        yield


def messages_when_stopping(trainer: Any, where: int) -> dict[str, str]:
    """What each place makes a trainer say that stops; it has made one healthy iteration before."""
    said = {}
    trainer.iterate(batches(0))
    for place in PLACES:
        with spoiled(trainer, place, where):
            try:
                trainer.iterate(batches(1))
            except UserError as error:
                said[place] = str(error)
        trainer.algorithm.current = None
    return said


def notes_when_skipping(trainer: Any, where: int) -> dict[str, Any]:
    """For each place what was counted, and how far weights and schedules moved; and the iteration after them all."""
    notes = {}
    engines = (trainer.algorithm.models.actor, trainer.algorithm.models.critic)
    for place in PLACES:
        before, rates = [whole_state(engine) for engine in engines], [engine.learning_rate for engine in engines]
        with spoiled(trainer, place, where):
            metrics = trainer.iterate(batches(1))
        moved = [
            largest_difference(whole_state(engine), state) if state else 0.0
            for engine, state in zip(engines, before, strict=True)
        ]
        stood = [engine.learning_rate == rate for engine, rate in zip(engines, rates, strict=True)]
        notes[place] = {"counted": metrics.get("skipped/nonfinite"), "moved": moved, "stood": stood}
    after = trainer.iterate(batches(2))
    return notes | {"after": {name: x for name, x in after.items() if not name.startswith("time/")}}


def empty_responses(trainer: Any, where: int) -> None:
    """Lets the responses of one process be empty."""
    real = trainer.algorithm.sampler.sample

    def sample(*arguments: Any, **named: Any) -> Any:
        drawn, texts = real(*arguments, **named)
        if rank() != where:
            return drawn, texts
        rollout = drawn.rollout
        mask = torch.zeros_like(rollout.response_mask)
        attention = rollout.attention_mask.clone()
        attention[:, rollout.prompt_width :] = False
        empty = replace(
            rollout, response_mask=mask, attention_mask=attention, finished=torch.zeros_like(rollout.finished)
        )
        drawn = replace(drawn, rollout=empty, logprobs=torch.zeros_like(drawn.logprobs))
        return drawn, replace(texts, responses=["" for _ in texts.responses])

    trainer.algorithm.sampler.sample = sample


def nonfinite(folder: Path, keep: Callable[..., None]) -> None:
    """The second process alone gets such numbers: what either says, counts and writes.

    At ZeRO 0 the engine leaves updates out, at ZeRO 2 DeepSpeed does.
    """
    for stage in (0, 2):
        place = folder / f"nonfinite-{stage}"
        said = messages_when_stopping(trainer_for(place / "stop", stage), 1)
        notes = notes_when_skipping(trainer_for(place / "skip", stage, on_nonfinite="skip"), 1)
        keep(folder, f"nonfinite-{stage}", {"said": said, "notes": notes})


def empty(folder: Path, keep: Callable[..., None]) -> None:
    """Two iterations in which all responses of the second process are empty, with an evaluation after them."""
    for stage in (0, 2, 3):
        trainer = trainer_for(folder / f"empty-{stage}", stage)
        empty_responses(trainer, 1)
        metrics = [trainer.iterate(batches(number)) for number in (0, 1)]
        metrics = [{name: x for name, x in row.items() if not name.startswith("time/")} for row in metrics]
        engines = {"actor": trainer.algorithm.models.actor, "critic": trainer.algorithm.models.critic}
        states = {name: whole_state(engine) for name, engine in engines.items()}
        weights = {f"{role}.{name}": w for role, state in states.items() for name, w in state.items()}
        keep(folder, f"empty-{stage}", [*metrics, trainer.evaluate()], weights)


def self_checks(folder: Path, keep: Callable[..., None]) -> None:
    """At ZeRO 3 with gradient checkpointing: what a self-check finds, and weights after an update with one before."""
    case, named = Case(3, 2, gradient_checkpointing=True), "inner.model.layers.1.mlp.up_proj.weight"
    ids, attention_mask, mask = pad_rows(ragged_rows([2, 5], [7, 3]))
    updated, said = [], ""
    for checked in (False, True):
        engine = engine_for(make_causal_lm(), case, folder)
        if checked:
            engine.eval()
            check_policy(engine, (ids, attention_mask), mask.shape[1], 0.8, PAD)
        supervised_update(supervised_trainer("sft", engine, case, folder / f"checked-{checked}"), 0)
        updated.append(whole_state(engine))
    if rank() == 1:
        engine.parts()[named][-1] = math.nan
    engine.eval()
    try:
        check_policy(engine, (ids, attention_mask), mask.shape[1], 0.8, PAD)
    except UserError as error:
        said = str(error)
    moved = largest_difference(*updated) if updated[0] else 0.0
    keep(folder, "self_checks", {"moved": moved, "said": said})


CHECKS = {"nonfinite": nonfinite, "empty": empty, "self_checks": self_checks}
