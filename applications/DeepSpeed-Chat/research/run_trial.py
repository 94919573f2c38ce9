# SPDX-License-Identifier: Apache-2.0
"""Runs one trial, a run of step 3 by `dschat.train`, and writes its curves."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

import dschat
from dschat.base.atomic import write_file
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.metrics import explained_variance
from macro_actions.estimators import ESTIMATORS, Estimator, EstimatorSettings
from macro_actions.types import MacroActions, PPOBatch, Trajectory
from starts import Starts
from tasks import TASKS, LearningTask
from trials import BATCH, Trial
from variants import VARIANTS, critic_values, middle_columns

HERE = Path(__file__).resolve().parent
# Column of the curves → metric of step 3, one value per rollout.
CURVES = {
    "kl": "objective/kl",
    "score": "objective/scores",
    "length": "response/length",
    "macro_length": "macro/length",
    "lambda_eff": "macro/lambda_eff",
    "explained_variance": "val/explained_variance",
    "clipfrac": "policy/clipfrac",
}


def run_trial(trial: Trial, folder: Path) -> None:
    """Trains a policy and writes its curves, one row per rollout.

    Args:
        trial: the settings of the run.
        folder: folder for starting models, runs and curves.
    """
    task = TASKS[trial.task]
    starts = Starts(folder / "starts")
    sft = starts.sft(task, trial.seed)
    output = folder / "runs" / trial.key
    config = make_config(trial, task, starts, output)

    curves = train_recorded(trial, config, f"objective/{task.kind}")
    # Scores are gold scores divided by their standard deviation; those of a learned reward model are not.
    gold_per_score = sft.spread if trial.scores == "gold" else math.nan
    curves["gold_per_token"] = curves.pop("score_per_token") * gold_per_score
    file = trial.file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, curves.to_csv(index=False, float_format="%.5g"))
    shutil.rmtree(output)


def train_recorded(trial: Trial, config: PPOConfig, gold: str) -> pd.DataFrame:
    """Trains and returns the curves of `read_curves`, with what was recorded of advantages, and seconds of the run."""
    start_time = time.perf_counter()
    start_cpu_time = time.process_time()
    with recorded_credit(trial, config) as recorder:
        dschat.train(config)
    seconds = time.perf_counter() - start_time
    cpu_seconds = time.process_time() - start_cpu_time

    curves = read_curves(Path(config.output.output_dir), gold)
    credit = pd.DataFrame(recorder.rows).iloc[-len(curves) :].reset_index(drop=True)
    return pd.concat([curves, credit], axis=1).assign(seconds=round(seconds, 1), cpu_seconds=round(cpu_seconds, 1))


def make_config(trial: Trial, task: LearningTask, starts: Starts, output: Path) -> PPOConfig:
    """Configuration of step 3 for a trial.

    Args:
        trial: the settings of the run.
        task: its task.
        starts: starting models, which are made when they do not exist yet.
        output: the run's output folder.
    """
    flags = _common_flags(trial, task, starts.sft(task, trial.seed).path, output)
    flags |= _score_flags(trial, task, starts)
    flags |= trial.flags

    # One pass over as many prompts as the updates need.
    num_prompts = trial.updates * int(str(flags["per_device_generation_batch_size"]))
    flags["data_path"] = [starts.prompts(task, trial.seed, num_prompts)]
    return PPOConfig(**flags)


def _common_flags(trial: Trial, task: LearningTask, sft: str, output: Path) -> dict[str, object]:
    """Flags that do not depend on the compared setting, but for the number of prompts.

    A rollout always has BATCH responses, so that its number of prompts follows from the responses per prompt.
    """
    prompts_per_rollout = BATCH // int(trial.flags.get("samples_per_prompt", 1))
    return {
        "actor_model_name_or_path": sft,
        "metric_function": f"{HERE / 'tasks.py'}:{task.kind}",
        "output_dir": str(output),
        "overwrite_output_dir": True,
        "data_split": "0,0,1",
        "num_train_epochs": 1,
        "eval_interval": 0,
        "per_device_generation_batch_size": prompts_per_rollout,
        "per_device_training_batch_size": BATCH,
        "max_prompt_seq_len": task.max_prompt,
        "max_answer_seq_len": task.length,
        "actor_learning_rate": 5e-4,
        "critic_learning_rate": trial.critic_rate,
        "actor_weight_decay": 0.0,
        "critic_weight_decay": 0.0,
        "lr_scheduler_type": "constant_with_warmup",
        "num_warmup_steps": 5,
        "missing_eos_penalty": 2.0 if task.ends else None,
        "seed": trial.seed,
        "dtype": "fp32",
    }


def _score_flags(trial: Trial, task: LearningTask, starts: Starts) -> dict[str, object]:
    """Flags of the source of scores, and of the model that the critic starts from."""
    sft = starts.sft(task, trial.seed)
    flags: dict[str, object] = {}
    if trial.scores == "gold":
        flags["reward_function"] = [f"{sft.reward_function}:score"]
    else:
        flags["reward_model_name_or_path"] = starts.scalar(trial.scores, task, trial.seed)
        flags["critic_model_name_or_path"] = sft.path
    if trial.critic != "fresh":
        flags["critic_model_name_or_path"] = starts.scalar(trial.critic, task, trial.seed)
    return flags


def read_curves(output: Path, gold: str) -> pd.DataFrame:
    """Metrics of a run's rollouts, one row each.

    Args:
        output: the run's output folder.
        gold: name of the metric with the gold score.

    Returns:
        Columns update, gold, and those of CURVES, NaN for metrics that the run does not have.
    """
    rows: list[dict[str, float]] = []
    with open(output / "metrics.jsonl", encoding="utf-8") as lines:
        for line in lines:
            metrics = json.loads(line)
            if gold not in metrics:
                continue
            row = {"update": len(rows) + 1, "gold": metrics[gold]}
            for name, metric in CURVES.items():
                row[name] = metrics.get(metric, math.nan)
            rows.append(row)
    return pd.DataFrame(rows)


@contextmanager
def recorded_credit(trial: Trial, config: PPOConfig) -> Iterator[CreditRecorder]:
    """Context in which the run uses the trial's estimator of advantages, which also records numbers for the curves."""
    name = config.advantages.advantage_estimator
    package_estimator = ESTIMATORS[name]
    recorder = CreditRecorder(package_estimator if trial.estimator == "product" else VARIANTS[trial.estimator])
    ESTIMATORS[name] = recorder
    try:
        yield recorder
    finally:
        ESTIMATORS[name] = package_estimator


@dataclass
class CreditRecorder:
    """An estimator of advantages that records a row of numbers about every batch."""

    estimator: Estimator
    rows: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, trajectory: Trajectory, macro: MacroActions, settings: EstimatorSettings) -> PPOBatch:
        """Estimates advantages and returns, and records a row."""
        batch = self.estimator(trajectory, macro, settings)
        row = {
            "advantage_rms": _rms(batch.advantages, batch.response_mask),
            "return_rms": math.nan,
            "explained_variance_middle": math.nan,
            "score_per_token": score_per_token(trajectory),
        }
        if batch.returns is not None:
            row["return_rms"] = _rms(batch.returns, batch.response_mask)
            row["explained_variance_middle"] = explained_variance_middle(batch)
        self.rows.append(row)
        return batch


def score_per_token(trajectory: Trajectory) -> float:
    """Slope of the score over the response length in tokens, by linear regression over the batch."""
    lengths = trajectory.response_mask.sum(1).float()
    deviations = lengths - lengths.mean()
    # Lengths are integers, so the sum of squares is at least 0.5 unless all are equal; then the slope is 0.
    squares = deviations.square().sum().clamp(min=0.5)
    slope = (deviations * trajectory.scores).sum() / squares
    return float(slope)


def explained_variance_middle(batch: PPOBatch) -> float:
    """Share of the variance of the rewards from each response's middle on that the critic's values there explain."""
    mask = batch.response_mask
    middle = middle_columns(mask)[:, None]
    is_later = torch.arange(mask.shape[1], device=mask.device) >= middle
    later_rewards = torch.where(is_later, batch.rewards, 0.0).sum(1)
    values_in_middle = critic_values(batch.trajectory).gather(1, middle)[:, 0]
    return explained_variance(values_in_middle, later_rewards, mask.any(1))


def _rms(x: Tensor, mask: Tensor) -> float:
    """Root mean square of the numbers under a mask."""
    return float(x[mask].square().mean().sqrt())
