# SPDX-License-Identifier: Apache-2.0
"""How well does `dschat.plan` foresee the memory of step 3?

One process on the CPU makes the four models of step 3 (random Gemmas under DeepSpeed, as a run makes them) and goes
through the phases of an iteration with rows of full length: sampling, scoring, the micro-batches of an update, the
optimiser. The measured figure is the most bytes of tensors alive in a phase: torch's allocator reports every
allocation to its profiler, and their running sum, from before the models are made on, is followed here. The planned
figure comes from the same flags and the model's config alone.

    python plan_check.py
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import torch
from transformers import GemmaConfig, GemmaForCausalLM, GemmaForSequenceClassification

from dschat.config.ppo import PPOConfig
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.process_group import choose_dtype, process_group
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.plan.machine import Machine
from dschat.plan.plan import make_plan
from dschat.rl.macro_actions import segment
from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import Rollout
from dschat.rollouts.compacting import CompactingEngine
from dschat.rollouts.sampling import Sampling
from dschat.scoring.reward_model import RewardModelScores
from dschat.scoring.source import ResponseTexts
from dschat.trainers.ppo.credit import assign_credit
from dschat.trainers.ppo.late_credit import LateCredit, PendingBatch
from dschat.trainers.ppo.models import PPOModels
from dschat.trainers.ppo.update import UpdateSettings, ppo_update
from harness import MB, gemma, in_process, report, settings_parser

SHAPES = {"S": (2048, 128, 4), "M": (32_000, 256, 6)}  # vocabulary, width, layers
Kind = tuple[Literal["fp32", "bf16"], bool, int]  # dtype, activations computed again, updates per rollout
KINDS: tuple[Kind, ...] = (("fp32", False, 1), ("fp32", True, 1), ("fp32", False, 2), ("bf16", False, 1))


@dataclass(frozen=True)
class Case:
    """One measurement."""

    vocabulary: int
    hidden: int
    layers: int
    dtype: Literal["fp32", "bf16"]
    checkpointing: bool
    updates: int  # per rollout
    rows: int  # of a micro-batch
    prompt: int
    response: int

    @property
    def shape(self) -> GemmaConfig:
        """Of all four models."""
        return gemma(self.vocabulary, self.hidden, self.layers, labels=1)

    @property
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
            dtype=self.dtype,
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
        found = profiler.profiler.kineto_results.events()
        events = sorted((e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]")
        peak = self.now
        for _, size in events:
            self.now += size
            peak = max(peak, self.now)
        peaks[name] = max(peak, peaks.get(name, 0))


def main() -> None:
    """Measures every case and prints one JSON object."""
    parser = settings_parser(__doc__, prompt=64, response=64)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["S", "M"])
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--short", action="store_true", help="float32 and one update per rollout only")
    settings = parser.parse_args()
    sizes = (settings.rows, settings.prompt, settings.response)
    kinds = KINDS[:1] if settings.short else KINDS
    cases = [Case(*SHAPES[shape], *kind, *sizes) for shape in settings.shapes for kind in kinds]
    report(settings, [in_process(compare, case) for case in cases])


def compare(case: Case) -> dict[str, object]:
    """Planned and measured megabytes of each phase."""
    torch.set_num_threads(1)
    plan = make_plan(case.flags, Machine(1, None), lambda path, flag: case.shape)
    planned = {phase.name: phase.total for phase in plan.phases}
    planned["train"] = max(planned["train"], planned.pop("update"))
    with process_group():
        measured = measure(case)
    rows = {
        name: {
            "planned_mb": round(total / MB, 1),
            "measured_mb": round(measured[name] / MB, 1),
            "ratio": round(total / measured[name], 3),
        }
        for name, total in planned.items()
    }
    return asdict(case) | {"phases": rows}


def measure(case: Case) -> dict[str, int]:
    """Peak bytes of each phase, the second time that it runs."""
    config, followed, peaks = case.flags, Followed(), dict[str, int]()
    rows, width = 2 * case.rows * case.updates, case.prompt + case.response
    with followed.watch({}, "made"):
        models = make_models(case)
        ids = torch.randint(1, case.vocabulary, (rows, width))  # a whole rollout, nothing padded
        rollout = Rollout(
            input_ids=ids,
            attention_mask=torch.ones_like(ids, dtype=torch.bool),
            response_mask=torch.ones(rows, case.response, dtype=torch.bool),
            prompt_index=torch.arange(rows),
            finished=torch.ones(rows, dtype=torch.bool),
        )
    for _ in range(2):
        models.actor.eval()
        with followed.watch(peaks, "generate"), CompactingEngine(case.rows).session(models.actor) as draw:
            no_end = case.vocabulary
            draw(ids[:, : case.prompt].tolist(), Sampling(case.response, (no_end,), pad_id=0), range(rows))
        with followed.watch(peaks, "score"):
            scored = models.score(rollout, ResponseTexts([], [], []), 1.0, case.rows)[0]
            trajectory = models.complete(scored, 1.0, case.rows)
        macro = segment(fixed_ngram_ends(rollout.response_mask, config.ngram), rollout.response_mask)
        credit = partial(assign_credit, kl_coef=config.kl_coef, config=config)
        late = LateCredit(PendingBatch(scored, macro), credit)
        batch = late if case.updates == 1 else credit(trajectory, macro)
        for engine in models.trained.values():
            engine.train()
        with followed.watch(peaks, "train"):
            settings = UpdateSettings(2 * case.rows, case.rows, 1, 0.2, 0.2, 1.0)
            ppo_update(models.actor, models.critic, batch, settings, seed=0)
    return peaks


def make_models(case: Case) -> PPOModels:
    """Random Gemmas under DeepSpeed."""
    from dschat.engine.engine import OptimizerSettings, frozen_engine, train_engine  # only processes of their own

    dtype, plan = choose_dtype(case.dtype), case.flags.plan_batches(1)
    torch.manual_seed(0)
    frozen, trained = (
        EngineSettings(dtype, plan),
        EngineSettings(dtype, plan, gradient_checkpointing=case.checkpointing),
    )
    optimizer = OptimizerSettings(learning_rate=1e-5, weight_decay=0.1, total_updates=10)

    def policy() -> PolicyModel:
        return PolicyModel(GemmaForCausalLM(case.shape)).to(dtype)

    def scalar() -> ScalarModel:
        return ScalarModel(GemmaForSequenceClassification(case.shape)).to(dtype)

    return PPOModels(
        actor=train_engine(policy(), optimizer, trained),
        reference=frozen_engine(policy(), frozen),
        critic=train_engine(scalar(), optimizer, trained),
        reward=RewardModelScores(frozen_engine(scalar(), frozen), case.rows),
        rollouts=CompactingEngine(case.rows),
    )


if __name__ == "__main__":
    main()
