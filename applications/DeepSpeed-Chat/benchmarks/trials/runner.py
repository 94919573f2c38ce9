# SPDX-License-Identifier: Apache-2.0
"""One PPO run inside this process, by the algorithm of step 3: what a command line would do around it is left out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from dschat.data.examples import prompt_examples
from dschat.rollouts.termination import Ends, TerminationCondition
from dschat.run.metrics import MetricsLog
from dschat.run.output import Run, new_record
from dschat.scoring.source import ResponseTexts, Scores, ScoreSource, scores_of
from dschat.settings.ppo import PPOConfig
from dschat.training.build.engines import RunPlan
from dschat.training.build.ppo import build_ppo_models, load_ppo_tokenizer
from dschat.training.ppo.algorithm import PPO
from dschat.training.ppo.models import ActorSampler
from macro_actions import estimators
from macro_actions.estimators import Estimator, EstimatorSettings
from macro_actions.types import MacroActions, PPOBatch, Rollout, Trajectory
from trials.matrix import BATCH, Result, Spec
from trials.starts import Start, Starts, sampling
from trials.tasks import TASKS, LearningTask
from trials.variants import ESTIMATORS, explained_variance, high_entropy, values_of

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


def run(spec: Spec, starts: Starts, folder: Path) -> Result:
    """Trains, from the models that `starts` gives; the folder is for files that the trainer writes."""
    begun = time.perf_counter()
    task = TASKS[spec.task]
    start = starts.sft(task, spec.seed)
    config = configure(spec, task, start, starts)
    plan = config.plan_batches(1)
    tokenizer = load_ppo_tokenizer(config)
    torch.manual_seed(spec.seed)
    models = build_ppo_models(
        config, RunPlan(plan, spec.updates * plan.updates_per_rollout, compiles=False), tokenizer
    )
    assert models.metric is not None
    product = estimators.ESTIMATORS[config.advantages.advantage_estimator]
    gold, noting = GoldByLength(models.metric), Noting(ESTIMATORS.get(spec.estimator, product))
    reward = Standardised(models.reward, start) if spec.scores == "gold" else models.reward
    models = replace(models, reward=reward, metric=gold)
    size = config.sampling.per_device_generation_batch_size  # prompts of a rollout, of BATCH responses in all
    prompts, _ = prompt_examples(task.rows(spec.updates * size, spec.seed, "ppo"), tokenizer, task.max_prompt)
    condition = TerminationCondition(config.termination, tokenizer, tokenizer.eos_token_id, spec.seed)
    if spec.condition == "high_entropy":  # asks the reference: more than a user's function is handed
        condition = cast(TerminationCondition, lambda known, epoch: Ends(high_entropy(known, models.reference)))
    # What a trainer needs of its run.
    bare = SimpleNamespace(plan=plan, folder=folder, record=new_record("ppo", [], 0, 1), metrics=MetricsLog(folder))
    sampler = ActorSampler(
        models.actor, tokenizer, sampling(task, tokenizer), config.optimisation.seed, models.rollouts
    )
    run_parts = cast(Run, bare)
    ppo = PPO(models, prompts, [], tokenizer, condition, config, run_parts, estimator=noting, sampler=sampler)
    curves: dict[str, list[float]] = {}
    for i in range(spec.updates):
        metrics = ppo.iterate([list(range(i * size, (i + 1) * size))], iteration=i)
        row = {name: metrics.get(key, math.nan) for name, key in CURVES.items()} | noting.seen
        row |= {"gold": metrics[f"objective/{task.kind}"], "gold_per_token": gold.slope}
        for name, number in row.items():
            curves.setdefault(name, []).append(float(f"{number:.5g}"))
    bare.metrics.close()
    return Result(asdict(spec), round(time.perf_counter() - begun, 1), curves)


def configure(spec: Spec, task: LearningTask, start: Start, starts: Starts) -> PPOConfig:
    """The flags of the run, as a command line would give them."""
    gold = f"{HERE / 'tasks.py'}:{task.kind}"
    flags: dict[str, object] = {
        "actor_model_name_or_path": start.sft,
        "reward_function": [gold] if spec.scores == "gold" else None,
        "metric_function": gold,
        "output_dir": "unused",
        "data_path": ["unused"],
        "per_device_generation_batch_size": BATCH // int(dict(spec.flags).get("samples_per_prompt", 1)),
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
    if spec.scores != "gold":
        flags["reward_model_name_or_path"] = starts.scalar(spec.scores, task, spec.seed)
        flags["critic_model_name_or_path"] = start.sft
    if spec.critic != "fresh":
        flags["critic_model_name_or_path"] = starts.scalar(spec.critic, task, spec.seed)
    if spec.condition not in ("product", "high_entropy"):
        flags["termination_condition"] = f"{HERE / 'variants.py'}:{spec.condition}"
    return PPOConfig(**flags | dict(spec.flags))


@dataclass
class Noting:
    """An estimator that keeps what the curves show of the last batch that it gave."""

    estimator: Estimator
    seen: dict[str, float] = field(default_factory=dict)

    def __call__(self, trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
        """Advantages and returns."""
        batch = self.estimator(trajectory, macro, settings)
        self.seen = {"advantage_rms": _rms(batch.advantages, batch.response_mask)}
        of_a_critic = {"return_rms": math.nan, "explained_variance_middle": math.nan}
        if batch.returns is not None:
            returns = _rms(batch.returns, batch.response_mask)
            of_a_critic = {"return_rms": returns, "explained_variance_middle": _at_middle(batch)}
        self.seen |= of_a_critic
        return batch


@dataclass(frozen=True)
class Standardised:
    """Scores in standard deviations from the mean of the SFT model's responses."""

    scores: ScoreSource
    start: Start
    model: None = None

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Scores:
        found, start = scores_of(self.scores(rollout, texts)), self.start
        segments = None if found.segments is None else found.segments / start.spread
        return replace(found, values=(found.values - start.mean) / start.spread, segments=segments)


@dataclass
class GoldByLength:
    """The gold score; notes how much more of it longer responses of the same rollout have."""

    scores: Callable[[Rollout, ResponseTexts], Tensor | Scores]
    slope: float = 0.0

    def __call__(self, rollout: Rollout, texts: ResponseTexts) -> Tensor:
        scores, lengths = scores_of(self.scores(rollout, texts)).values, rollout.response_mask.sum(1).float()
        spread = lengths - lengths.mean()
        self.slope = float((spread * scores).sum() / spread.square().sum().clamp(min=1))
        return scores


def _rms(x: Tensor, mask: Tensor) -> float:
    return float(x[mask].square().mean().sqrt())


def _at_middle(batch: PPOBatch) -> float:
    """How much of what is still to come the critic knows in the middle of each response."""
    mask = batch.response_mask
    middle = (mask.sum(1) // 2)[:, None]
    to_come = torch.where(torch.arange(mask.shape[1]) >= middle, batch.rewards, 0.0).sum(1)
    return explained_variance(values_of(batch.trajectory).gather(1, middle)[:, 0], to_come)
