# SPDX-License-Identifier: Apache-2.0
"""One PPO run inside this process, by the trainer of step 3: what a command line would do around it is left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from dschat.trainers.ppo.trainer import PPOTrainer
from torch import Tensor

from dschat.builders.ppo import build_ppo_models, load_ppo_tokenizer
from dschat.conditions.termination import Ends, TerminationCondition
from dschat.config.batches import BatchPlan
from dschat.config.ppo import PPOConfig
from dschat.data.examples import prompt_examples
from dschat.rl.masked import masked_moments
from dschat.rl.rewards import ScoreMoments
from dschat.rl.types import MacroActions, PPOBatch, Rollout, ScoredRollout, Trajectory
from dschat.run.metrics import MetricsLog
from dschat.run.output import new_record
from dschat.scoring.source import ResponseTexts, ScoreSource
from dschat.trainers.credit import assign_credit
from dschat.trainers.ppo_models import ActorSampler
from trials.conditions import HighEntropy
from trials.estimators import ESTIMATORS, Estimator, values_of
from trials.spec import BATCH, Spec
from trials.starts import Start, Starts, explained_variance, sampling
from trials.tasks import TASKS, Task

HERE = Path(__file__).resolve().parent
# Names in a result → metrics of step 3, per update.
CURVES = {
    "kl": "objective/kl",
    "score": "objective/scores",
    "length": "response/length",
    "macro_length": "macro/length",
    "lambda_eff": "macro/lambda_eff",
    "explained_variance": "val/explained_variance",
    "clipfrac": "policy/clipfrac",
}


def run(spec: Spec, starts: Starts, folder: Path) -> dict[str, Any]:
    """Trains; returns the curves, one number per PPO iteration.

    Args:
        spec: what to run.
        starts: gives the models to start from.
        folder: for files that the trainer writes.
    """
    begun = time.perf_counter()
    task = TASKS[spec.task]
    start = starts.sft(task, spec.seed)
    config = configure(spec, task, start, starts)
    plan = config.plan_batches(1)
    tokenizer = load_ppo_tokenizer(config)
    torch.manual_seed(spec.seed)
    models = build_ppo_models(config, plan, tokenizer, spec.updates * plan.updates_per_rollout)
    if spec.scores == "gold":
        models = replace(models, reward=Standardised(models.reward, start))
    assert models.metric is not None
    gold = GoldByLength(models.metric)
    models = replace(models, metric=gold)
    prompts, _ = prompt_examples(task.rows(spec.updates * BATCH, spec.seed, "ppo"), tokenizer, task.max_prompt)
    condition: Any = TerminationCondition(config, tokenizer, tokenizer.eos_token_id, spec.seed)
    if spec.condition == "high_entropy":
        condition = ByReference(HighEntropy(models.reference))
    bare = BareRun(plan, folder)
    parts: tuple[Any, ...] = (models, prompts, [], tokenizer, condition, config, bare)
    trainer = Trainer(ESTIMATORS[spec.estimator], *parts, cast(Any, None), cast(Any, None))
    trainer.sample = ActorSampler(models.actor, tokenizer, sampling(task, tokenizer), config.seed, models.rollouts)
    curves: dict[str, list[float]] = {}
    for i in range(spec.updates):
        metrics = trainer.iterate([list(range(i * BATCH, (i + 1) * BATCH))], epoch=0)
        row = {name: metrics[key] for name, key in CURVES.items()} | trainer.seen
        row |= {"gold": metrics[f"objective/{task.kind}"], "gold_per_token": gold.slope}
        for name, number in row.items():
            curves.setdefault(name, []).append(float(f"{number:.5g}"))
    bare.metrics.close()
    return {"spec": asdict(spec), "seconds": round(time.perf_counter() - begun, 1), "curves": curves}


def configure(spec: Spec, task: Task, start: Start, starts: Starts) -> PPOConfig:
    """The flags of the run, as a command line would give them."""
    scalar = {}
    if spec.critic != "fresh":
        scalar["critic_model_name_or_path"] = starts.scalar(spec.critic, task, spec.seed)
    if spec.scores != "gold":
        scalar["reward_model_name_or_path"] = starts.scalar(spec.scores, task, spec.seed)
        scalar.setdefault("critic_model_name_or_path", start.sft)
    gold = f"{HERE / 'tasks.py'}:{task.kind}"
    defaults: dict[str, Any] = {
        "actor_model_name_or_path": start.sft,
        "reward_function": [gold] if spec.scores == "gold" else None,
        "metric_function": gold,
        "output_dir": "unused",
        "data_path": ["unused"],
        "per_device_generation_batch_size": BATCH,
        "per_device_training_batch_size": BATCH,
        "max_prompt_seq_len": task.max_prompt,
        "max_answer_seq_len": task.length,
        "actor_learning_rate": 5e-4,
        "critic_learning_rate": spec.critic_rate,
        "actor_weight_decay": 0.0,
        "critic_weight_decay": 0.0,
        "lr_scheduler_type": "constant_with_warmup",
        "num_warmup_steps": 5,
        "missing_eos_penalty": 2.0 if task.ends else None,
        "seed": spec.seed,
        "dtype": "fp32",
    }
    own = spec.condition not in ("product", "high_entropy")
    condition = {"termination_condition": f"{HERE / 'conditions.py'}:{spec.condition}"} if own else {}
    return PPOConfig(**(defaults | scalar | condition | dict(spec.flags)))


class ByReference:
    """A condition that asks the reference: more than a user's function is handed."""

    def __init__(self, ends: HighEntropy) -> None:
        self._ends = ends

    def __call__(self, trajectory: Trajectory | ScoredRollout, epoch: int) -> Ends:
        return Ends(self._ends(trajectory))


class Standardised:
    """Scores in standard deviations from the mean of the SFT model's responses."""

    model: None = None

    def __init__(self, scores: ScoreSource, start: Start) -> None:
        self._scores, self._start = scores, start

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        scores = self._scores(rollout, texts)
        assert isinstance(scores, Tensor)  # one for every response of the benchmark's tasks
        return (scores - self._start.mean) / self._start.spread


class GoldByLength:
    """The gold score; notes how much more of it longer responses of the same rollout have."""

    def __init__(self, scores: Callable[[Rollout, ResponseTexts], Tensor]) -> None:
        self._scores, self.slope = scores, 0.0

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        scores, lengths = self._scores(rollout, texts), rollout.response_mask.sum(1).float()
        spread = lengths - lengths.mean()
        self.slope = float((spread * scores).sum() / spread.square().sum().clamp(min=1))
        return scores


class BareRun:
    """What a trainer needs of its run."""

    def __init__(self, plan: BatchPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.record = new_record("ppo", [], 0, 1)
        self.metrics = MetricsLog(folder)


class Trainer(PPOTrainer):
    """Step 3's trainer with an estimator to choose; it notes more of each batch."""

    def __init__(self, estimator: Estimator, *parts: Any) -> None:
        super().__init__(*parts)
        self._estimator = estimator
        self.seen: dict[str, float] = {}

    def credit(
        self, trajectory: Trajectory, macro: MacroActions, samples: int = 1, seen: ScoreMoments | None = None
    ) -> PPOBatch:
        """Advantages and returns, by the estimator."""
        if self._estimator is assign_credit:
            batch = super().credit(trajectory, macro, samples, seen)
        else:
            assert self.moments is None and samples == 1  # no other estimator knows of them
            batch = self._estimator(trajectory, macro, self.kl.value, self.config)
        assert batch.returns is not None  # of a critic
        self.seen = {
            "advantage_rms": _rms(batch.advantages, batch.response_mask),
            "return_rms": _rms(batch.returns, batch.response_mask),
            "explained_variance_middle": _at_middle(batch),
        }
        return batch


def _rms(x: Tensor, mask: Tensor) -> float:
    count, _, squares = masked_moments(x, mask)
    return float((squares / count).sqrt())


def _at_middle(batch: PPOBatch) -> float:
    """How much of what is still to come the critic knows in the middle of each response."""
    mask = batch.response_mask
    middle = (mask.sum(1) // 2)[:, None]
    to_come = torch.where(torch.arange(mask.shape[1]) >= middle, batch.rewards, 0.0).sum(1)
    return explained_variance(values_of(batch.trajectory).gather(1, middle)[:, 0], to_come)
