# SPDX-License-Identifier: Apache-2.0
"""Fixed inputs of all steps at a global batch of 8, and their updates at any ZeRO stage on any number of processes."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dschat.data.batches import update_batches
from dschat.data.examples import PairExample, PreferenceExample, SFTExample
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.run.distributed import rank, world_size
from dschat.settings.batches import BatchSizes, plan_batches
from dschat.training.loop import Loop
from dschat.training.ppo.credit import Credit, whiten_advantages
from dschat.training.ppo.update import UpdateContext, ppo_update
from factories import (
    engine_of,
    make_causal_lm,
    make_classifier,
    make_rollout,
    ragged_rows,
    score,
    supervised_loop,
    update_flags,
    weights_of_all,
    whole_state,
)
from macro_actions.conditions import fixed
from macro_actions.types import PPOBatch, select_rows
from rl_cases import credit_of

GLOBAL_BATCH = 8
UPDATES = 2
LEARNING_RATE = 1e-4  # Adam's first step is this large however small a gradient is, also where it is only rounding
PROMPTS = [2, 5, 9, 1, 3, 4, 6, 2]
RESPONSES = [7, 1, 4, 3, 9, 2, 5, 8]
ROWS = ragged_rows(PROMPTS, RESPONSES)
DEMONSTRATIONS = [SFTExample(p, r) for p, r in ragged_rows(PROMPTS * 2, [*RESPONSES, *RESPONSES[::-1]], seed=1)]
PAIRS = [
    PairExample(chosen, rejected)
    for (_, chosen), (_, rejected) in zip(
        ragged_rows([1] * 16, [5, 8, 3, 9, 4, 4, 7, 2] * 2, seed=2),
        ragged_rows([1] * 16, [6, 2, 9, 3, 4, 8, 5, 7] * 2, seed=3),
        strict=True,
    )
]

PREFERENCES = [
    PreferenceExample(prompt, chosen, rejected)
    for (prompt, chosen), (_, rejected) in zip(
        ragged_rows(PROMPTS * 2, [*RESPONSES, *RESPONSES[::-1]], seed=1),
        ragged_rows(PROMPTS * 2, [6, 2, 9, 3, 4, 8, 5, 7] * 2, seed=3),
        strict=True,
    )
]


MEANS = {"token": "token", "macro": "macro", "macro_mean": "token", "sequence_mean": "response"}  # loss by ratio


@dataclass(frozen=True)
class Case:
    """One way to make the updates."""

    zero_stage: int = 0
    accumulation: int = 1
    gradient_checkpointing: bool = False
    offload: bool = False
    tokens: int | None = None  # of a micro-batch; twice as many of pairs

    @property
    def name(self) -> str:
        """As in test ids."""
        parts = [f"zero{self.zero_stage}", f"accumulation{self.accumulation}"]
        parts += ["checkpointing"] * self.gradient_checkpointing + ["offload"] * self.offload
        parts += [] if self.tokens is None else [f"tokens{self.tokens}"]
        return "-".join(parts)


# On two processes: every stage and accumulation, checkpointing where most happens. All others are slow.
FAST_CASES = (Case(0, 4), Case(1, 1), Case(2, 2, gradient_checkpointing=True), Case(3, 4, gradient_checkpointing=True))
# By tokens; at 18, one of two processes would need four micro-batches of its rows and one three.
TOKEN_CASES = (Case(0, 1, tokens=18), Case(2, 1, offload=True, tokens=18), Case(3, 1, tokens=18))
ALL_CASES = tuple(Case(*values) for values in itertools.product((0, 1, 2, 3), (1, 2, 4), (False, True), (False, True)))


def engine_for(model: Any, case: Case, folder: Path, **options: Any) -> Any:
    """A training engine whose updates take the global batch, whatever the number of processes."""
    micro = GLOBAL_BATCH // (case.accumulation * world_size())
    options = {"learning_rate": LEARNING_RATE, "zero_stage": case.zero_stage, "offload": case.offload} | options
    options |= {"gradient_checkpointing": case.gradient_checkpointing}
    sizes = BatchSizes("per_device_train_batch_size", micro, case.accumulation)
    options.setdefault("plan", plan_batches(sizes, world_size(), max_tokens=case.tokens))
    return engine_of(model, micro, case.accumulation, **options)


_number = itertools.count()  # of a run's folder, the same on every process: no run finds what another left


def supervised_trainer(step: str, engine: Any, case: Case, folder: Path, held_out: Any = ()) -> Any:
    """Steps 1 (sft) and 2 (reward or dpo) on the recorded examples."""
    examples: dict[str, Any] = {"sft": DEMONSTRATIONS, "reward": PAIRS, "dpo": PREFERENCES}
    flags: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL_BATCH // (case.accumulation * world_size()),
        "gradient_accumulation_steps": case.accumulation,
        "per_device_eval_batch_size": 2,
        "max_tokens_per_micro_batch": case.tokens and case.tokens * (1 if step == "sft" else 2),
    }
    place = folder / f"{step}-{next(_number)}"
    loop = supervised_loop(step, place, examples[step], held_out, engine=engine, **flags)
    loop.algorithm.prepare()
    return loop


def supervised_update(trainer: Loop, number: int) -> dict[str, float]:
    """Update `number` of the epoch, on this process's share."""
    plan = trainer.run.plan
    updates = update_batches(
        trainer.algorithm.lengths,
        plan.global_batch,
        plan.micro_batch,
        seed=5,
        epoch=0,
        rank=rank(),
        world_size=world_size(),
    )
    return trainer.iterate(updates[number])


def scored_batch(drift: float = 0.3, estimator: str = "gae") -> PPOBatch:
    """A rollout of eight rows, by rloo of four prompts and without values; stored log-probs are off by `drift`."""
    rollout = make_rollout(ROWS, left=1, right=2)
    actor, reference = PolicyModel(make_causal_lm()), PolicyModel(make_causal_lm(seed=1))
    critic = ScalarModel(make_classifier(seed=2))
    generator = torch.Generator().manual_seed(0)
    trajectory = score(rollout, torch.randn(8, generator=generator), actor, reference, critic, 1.0, 8)
    trajectory.logprobs.add_(drift * torch.randn(trajectory.logprobs.shape, generator=generator))
    ends = fixed(trajectory.response_mask, 3)
    if estimator == "rloo":
        return credit_of(replace(trajectory, values=None), ends, "rloo", samples=2, kl_coef=0.05)
    return credit_of(trajectory, ends, kl_coef=0.05, gamma=1.0, lam=0.95)


def recorded_batch() -> PPOBatch:
    """This process's rows of `scored_batch`, with advantages whitened over all rows."""
    return whiten_advantages(select_rows(scored_batch(), torch.arange(GLOBAL_BATCH)[rank() :: world_size()]))


def ppo_updates(
    actor: Any, critic: Any, batch: PPOBatch, accumulation: int, number: int, tokens: int | None = None
) -> dict[str, float]:
    """Update `number` of actor and critic, on this process's rows."""
    share = GLOBAL_BATCH // world_size()
    settings = update_flags(share, share // accumulation, 1, tokens)
    return ppo_update(UpdateContext(actor, critic, Credit(batch), *settings), seed=number)


def updated(
    batch: PPOBatch,
    micro: int = 8,
    update_size: int = 8,
    epochs: int = 1,
    seed: int = 0,
    learning_rate: float = 5e-5,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights of actor and critic after ppo_update, and its statistics.

    Adam's first step is the sign of the gradient times the learning rate, whatever the gradient's size: where it is 0
    but for rounding, a step of 1e-3 would show as much. The gradient norms in the statistics see the size.
    """
    sizes = micro, update_size // micro
    engines = {"actor": engine_of(make_causal_lm(), *sizes, learning_rate=learning_rate)}
    if batch.returns is not None:
        engines["critic"] = engine_of(make_classifier(seed=2), *sizes, learning_rate=learning_rate)
    mean = MEANS[options.get("policy_ratio", "token")]
    settings = update_flags(update_size, micro, epochs, **{"loss_mean": mean} | options)
    stats = ppo_update(UpdateContext(engines["actor"], engines.get("critic"), Credit(batch), *settings), seed)
    return weights_of_all(**engines), stats


def run_case(case: Case, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Both updates of every step.

    Returns:
        Whole weights by "step/update/name" on the main process ({} elsewhere), and losses and gradient norms by
        "step/update/name".
    """
    weights: dict[str, torch.Tensor] = {}
    metrics: dict[str, float] = {}

    def note(step: str, update: int, numbers: dict[str, float], **engines: Any) -> None:
        for role, engine in engines.items():
            state = whole_state(engine)
            weights.update({f"{step}/{update}/{role}.{name}": w for name, w in state.items()})
        kept = {name: number for name, number in numbers.items() if name.startswith(("loss", "grad_norm"))}
        metrics.update({f"{step}/{update}/{name}": number for name, number in kept.items()})

    for step, model in (("sft", make_causal_lm()), ("reward", make_classifier(seed=2)), ("dpo", make_causal_lm())):
        trainer = supervised_trainer(step, engine_for(model, case, folder), case, folder)
        for update in range(UPDATES):
            note(step, update, supervised_update(trainer, update), model=trainer.algorithm.engine)
    actor = engine_for(make_causal_lm(), case, folder)
    critic = engine_for(make_classifier(seed=2), case, folder)
    batch = recorded_batch()
    for update in range(UPDATES):
        numbers = ppo_updates(actor, critic, batch, case.accumulation, update, case.tokens)
        note("ppo", update, numbers, actor=actor, critic=critic)
    return weights, metrics


def untied_updates(case: Case, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Both updates of step 1 with a head of its own (Llama): whole weights, and what this process holds of them."""
    trainer = supervised_trainer("sft", engine_for(make_causal_lm("llama"), case, folder), case, folder)
    for update in range(UPDATES):
        supervised_update(trainer, update)
    held = sum(p.numel() for p in trainer.algorithm.engine.module.parameters())
    return whole_state(trainer.algorithm.engine), held
