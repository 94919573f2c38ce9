# SPDX-License-Identifier: Apache-2.0
"""How well does `dschat.plan` foresee the memory of step 3?

One process on the CPU makes the four models of step 3 (random Gemmas under DeepSpeed, as a run makes them) and goes
through the phases of an iteration with rows of full length: sampling, scoring, the micro-batches of an update, the
optimiser. The measured figure is the most bytes of tensors alive in a phase: torch's allocator reports every
allocation to its profiler, and their running sum, from before the models are made on, is followed here. The planned
figure comes from the same flags and the model's config alone.

    python plan_check.py
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from dschat.trainers.ppo.late_credit import LateCredit
from machine import machine
from transformers import GemmaConfig, GemmaForCausalLM, GemmaForSequenceClassification

from dschat.config.ppo import PPOConfig
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.process_group import process_group, training_dtype
from dschat.models.engines import TrainedPolicy
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.plan.phases import Machine, Phase
from dschat.plan.plan import make_plan
from dschat.rl.macro_actions import segment
from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import Rollout
from dschat.rollouts.generate import ContinuousEngine
from dschat.rollouts.sampling import Sampling
from dschat.scoring.reward_model import RewardModelScores
from dschat.scoring.source import ResponseTexts
from dschat.trainers.credit import assign_credit
from dschat.trainers.ppo_models import PPOModels
from dschat.trainers.ppo_update import PendingBatch, UpdateSettings, ppo_update

MB = 1e6  # bytes
SHAPES = {"S": (2048, 128, 4), "M": (32_000, 256, 6)}  # vocabulary, width, layers


@dataclass(frozen=True)
class Case:
    """One measurement."""

    vocabulary: int
    hidden: int
    layers: int
    dtype: str
    checkpointing: bool
    updates: int  # per rollout
    rows: int  # of a micro-batch
    prompt: int
    response: int

    def gemma(self) -> GemmaConfig:
        """The shape of all four models."""
        return GemmaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=self.hidden // 4,
            num_labels=1,
        )

    def flags(self) -> PPOConfig:
        """Of a run of this case: two micro-batches an update."""
        return PPOConfig(
            data_path=["none"],
            output_dir="none",
            actor_model_name_or_path="gemma",
            critic_model_name_or_path="gemma",
            per_device_training_batch_size=self.rows,
            gradient_accumulation_steps=2,
            per_device_generation_batch_size=self.rows,
            per_device_eval_batch_size=self.rows,
            generation_batches=2 * self.updates,
            max_prompt_seq_len=self.prompt,
            max_answer_seq_len=self.response,
            actor_gradient_checkpointing=self.checkpointing,
            critic_gradient_checkpointing=self.checkpointing,
            dtype=self.dtype,  # type: ignore[arg-type]
        )


class Followed:
    """Bytes of tensors alive, from one `watch` to the next."""

    def __init__(self) -> None:
        self.now = 0

    @contextmanager
    def watch(self, peaks: dict[str, int], name: str) -> Iterator[None]:
        """Notes the peak of what happens inside."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            yield
            gc.collect()  # what is given back outside would not be seen
        found = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        events = sorted((e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]")
        peak = self.now
        for _, size in events:
            self.now += size
            peak = max(peak, self.now)
        peaks[name] = max(peak, peaks.get(name, 0))


def main() -> None:
    """Measures every case and prints one JSON object."""
    settings = parse()
    cases = [
        Case(*SHAPES[shape], dtype, checkpointing, updates, settings.rows, settings.prompt, settings.response)
        for shape in settings.shapes
        for dtype, checkpointing, updates in settings.cases
    ]
    figures = []
    for case in cases:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            figures.append(pool.submit(compare, case).result())
    shown = {name: value for name, value in vars(settings).items() if name != "cases"}
    print(json.dumps({"machine": machine(), "settings": shown, "figures": figures}, indent=2))


def parse() -> argparse.Namespace:
    """The settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["S", "M"])
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--response", type=int, default=64, help="tokens")
    parser.add_argument("--short", action="store_true", help="float32 and one update per rollout only")
    settings = parser.parse_args()
    settings.cases = [("fp32", False, 1)]
    if not settings.short:
        settings.cases += [("fp32", True, 1), ("fp32", False, 2), ("bf16", False, 1)]
    return settings


def compare(case: Case) -> dict[str, Any]:
    """Planned and measured megabytes of each phase. What libraries print goes to stderr."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    plan = make_plan(case.flags(), Machine(1, None), lambda path, flag: case.gemma())
    with process_group():
        measured = measure(case)
    phases = {phase.name: phase for phase in plan.phases}
    phases["train"] = max(phases["train"], phases.pop("update"), key=lambda phase: phase.total)
    rows = {name: row(phase, measured[name]) for name, phase in phases.items()}
    return vars(case) | {"phases": rows}


def row(phase: Phase, measured: int) -> dict[str, float]:
    """One phase, in megabytes."""
    planned = phase.total
    return {
        "planned_mb": round(planned / MB, 1),
        "measured_mb": round(measured / MB, 1),
        "ratio": round(planned / measured, 3),
    }


def measure(case: Case) -> dict[str, int]:
    """Peak bytes of each phase, the second time that it runs."""
    followed, peaks = Followed(), {}
    with followed.watch({}, "made"):
        models, rollout = make_models(case), random_rollout(case)
    for _ in range(2):
        with followed.watch(peaks, "generate"):
            sample(case, models.actor, rollout)
        with followed.watch(peaks, "score"):
            scored = models.score(rollout, ResponseTexts([], [], []), 1.0, case.rows)[0]
            trajectory = models.complete(scored, 1.0, case.rows)
        config = case.flags()
        macro = segment(fixed_ngram_ends(rollout.response_mask, config.ngram), rollout.response_mask)
        credit = partial(assign_credit, kl_coef=config.kl_coef, config=config)
        late = LateCredit(PendingBatch(scored, macro), credit)
        batch = late if case.updates == 1 else credit(trajectory, macro)
        for engine in (models.actor, models.critic):
            engine.train()
        update = UpdateSettings(2 * case.rows, case.rows, 1, 0.2, 0.2, 1.0)
        with followed.watch(peaks, "train"):
            ppo_update(models.actor, models.critic, batch, update, seed=0)
    return peaks


def make_models(case: Case) -> PPOModels:
    """Random Gemmas under DeepSpeed."""
    from dschat.engine.engine import OptimizerSettings, frozen_engine, train_engine  # only processes of their own

    config, flags, dtype = case.gemma(), case.flags(), training_dtype(case.dtype)
    torch.manual_seed(0)
    frozen = EngineSettings(dtype, flags.plan_batches(1))
    trained = EngineSettings(dtype, flags.plan_batches(1), gradient_checkpointing=case.checkpointing)
    optimizer = OptimizerSettings(learning_rate=1e-5, weight_decay=0.1, total_updates=10)
    return PPOModels(
        actor=train_engine(PolicyModel(GemmaForCausalLM(config).to(dtype)), optimizer, trained),
        reference=frozen_engine(PolicyModel(GemmaForCausalLM(config).to(dtype)), frozen),
        critic=train_engine(ScalarModel(GemmaForSequenceClassification(config).to(dtype)), optimizer, trained),
        reward=RewardModelScores(
            frozen_engine(ScalarModel(GemmaForSequenceClassification(config).to(dtype)), frozen), case.rows
        ),
        rollouts=ContinuousEngine(case.rows),
    )


def random_rollout(case: Case) -> Rollout:
    """Random tokens of a whole rollout, nothing padded."""
    rows = 2 * case.rows * case.updates
    return Rollout(
        input_ids=torch.randint(1, case.vocabulary, (rows, case.prompt + case.response)),
        attention_mask=torch.ones(rows, case.prompt + case.response, dtype=torch.bool),
        response_mask=torch.ones(rows, case.response, dtype=torch.bool),
        prompt_index=torch.arange(rows),
        finished=torch.ones(rows, dtype=torch.bool),
    )


def sample(case: Case, actor: TrainedPolicy, rollout: Rollout) -> None:
    """Responses of a whole rollout, which no token ends."""
    actor.eval()
    prompts = rollout.input_ids[:, : case.prompt].tolist()
    sampling = Sampling(case.response, end_ids=(case.vocabulary,), pad_id=0)
    with ContinuousEngine(case.rows).session(actor) as draw:
        draw(prompts, sampling, range(len(prompts)))


if __name__ == "__main__":
    main()
