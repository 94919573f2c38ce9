# SPDX-License-Identifier: Apache-2.0
"""Step 3, PPO over macro actions: sample, score, segment, assign credit, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dschat.conditions.termination import Segmenter
from dschat.data.collate import collate_prompts, update_batches
from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.errors import UserError
from dschat.rl.ppo_batch import ppo_batch
from dschat.rl.rewards import AdaptiveKL, FixedKL
from dschat.rl.types import PPOBatch, Rollout, Trajectory
from dschat.rollouts.generate import concatenate, generate
from dschat.rollouts.sampling import Sampling
from dschat.run.distributed import device, is_main, rank, world_size
from dschat.scoring.source import ResponseTexts, ScoreSource
from dschat.trainers.ppo.checks import check_batch, check_number
from dschat.trainers.ppo.metrics import rollout_metrics
from dschat.trainers.ppo.moving_average import MovingAverage
from dschat.trainers.ppo.trajectory import score
from dschat.trainers.ppo.update import UpdateSettings, ppo_update, whiten_advantages
from dschat.trainers.selfcheck import check_rollout, check_scalar


@dataclass(frozen=True)
class PPOModels:
    """Engines and reward sources of a run."""

    actor: Any  # of a PolicyModel
    reference: Any  # of a PolicyModel, frozen
    critic: Any  # of a ScalarModel
    reward: ScoreSource
    metric: ScoreSource | None = None  # a second score, logged and never trained on
    metric_name: str = ""


@dataclass
class Clock:
    """Seconds of the parts of an iteration, waiting for the device at each border."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """Books the time since the last lap under ``time/name``."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[f"time/{name}"] = now - self._last
        self._last = now


class PPOTrainer:
    """Trains actor and critic; everything it needs is handed in."""

    def __init__(
        self,
        models: PPOModels,
        prompts: Sequence[PromptExample],
        tokenizer: Any,
        sampling: Sampling,
        segmenter: Segmenter,
        config: Any,
        stage: Any,
        evaluate: Callable[[PPOTrainer], dict[str, float]],
        save: Callable[[Path], None],
        average: MovingAverage | None = None,
    ) -> None:
        """Takes the parts of a run.

        Args:
            models: engines and reward sources.
            prompts: of training.
            tokenizer: the actor's.
            sampling: how responses are drawn.
            segmenter: the termination condition.
            config: PPOConfig.
            stage: the run's Stage.
            evaluate: called with the trainer at the start, every --eval_interval updates and at the end.
            save: writes the models into a folder.
            average: moving average of the actor, updated after every iteration.
        """
        self.average = average
        self.models, self.prompts, self.tokenizer = models, prompts, tokenizer
        self.sampling, self.segmenter, self.config, self.stage = sampling, segmenter, config, stage
        self._evaluate, self._save = evaluate, save
        self.update = self.iteration = 0
        target, horizon = config.adaptive_kl_target, config.adaptive_kl_horizon
        self.kl: FixedKL | AdaptiveKL = FixedKL(config.kl_coef)
        if target is not None:
            self.kl = AdaptiveKL(config.kl_coef, target, horizon)
        plan = stage.plan
        self.update_settings = UpdateSettings(
            plan.update_per_rank,
            plan.micro_batch,
            config.ppo_epochs,
            config.cliprange,
            config.cliprange_value,
            self.log_prob_temperature,
            config.policy_ratio,
        )

    @property
    def log_prob_temperature(self) -> float:
        """Temperature of every log-prob: that of sampling, 1 for greedy decoding."""
        return self.sampling.temperature or 1.0

    def fit(self) -> dict[str, float]:
        """Trains to the end and saves; returns the last evaluation's metrics."""
        config, plan = self.config, self.stage.plan
        rollout_size = plan.rollout_per_rank * plan.world_size
        if config.self_checks:
            self.self_check()
        self.evaluate()
        total = total_updates(len(self.prompts), config, plan)
        with tqdm(total=total, desc="ppo", disable=not is_main(), mininterval=1.0) as bar:
            self._train_all(rollout_size, total, bar)
        result = self.evaluate()
        self._save(Path(config.output_dir))
        return result

    def self_check(self) -> None:
        """A few forward passes on two prompts, before anything is trained or measured.

        Raises:
            UserError: a model is computed wrongly, or sampling is not what was asked for.
        """
        rollout, text = self.sample([list(self.prompts[:2])], draw=0, kind=3)
        trajectory, _ = self.score(rollout, text)
        sampling, temperature = self.sampling, self.log_prob_temperature
        check_rollout(self.models.actor, trajectory, temperature, sampling)
        tokens = (rollout.input_ids, rollout.attention_mask)
        check_scalar(self.models.critic, tokens, sampling.pad_id)
        if self.models.reward.model is not None:
            check_scalar(self.models.reward.model, tokens, sampling.pad_id)

    def evaluate(self) -> dict[str, float]:
        """Runs the evaluation and records its metrics for model cards and run.json."""
        metrics = self._evaluate(self)
        self.stage.record.measured(metrics, self.update)
        return metrics

    def _train_all(self, rollout_size: int, total: int, bar: Any) -> None:
        config = self.config
        for epoch in range(config.num_train_epochs):
            rollouts = update_batches(
                [len(prompt) for prompt in self.prompts],
                rollout_size,
                config.per_device_generation_batch_size,
                config.seed,
                epoch,
                rank=rank(),
                world_size=world_size(),
            )
            for batches in rollouts:
                before = self.update
                metrics = self.step(batches, epoch)
                bar.set_postfix(reward=f"{metrics['objective/scores']:.3f}", kl=f"{metrics['objective/kl']:.3f}")
                bar.update(self.update - before)
                if self.stage.due(config.eval_interval, before, self.update) and self.update < total:
                    self.evaluate()
                if self.stage.due(config.save_steps, before, self.update):
                    self._save(self.stage.checkpoint_folder(self.update))

    def step(self, batches: list[list[int]], epoch: int) -> dict[str, float]:
        """One PPO iteration on the prompts of ``batches`` (generation batches of prompt numbers)."""
        clock = Clock()
        learning_rates = {"lr/actor": self.models.actor.learning_rate, "lr/critic": self.models.critic.learning_rate}
        rollout, text = self.sample([[self.prompts[i] for i in rows] for rows in batches], self.iteration)
        clock.lap("generation")
        trajectory, metric = self.score(rollout, text)
        cuts = self.segmenter(trajectory, epoch)
        batch = self.assign_credit(trajectory, cuts.ends)
        check_batch(batch, self.update)
        metrics = rollout_metrics(batch, self.config.lam, metric, self.models.metric_name, cuts.totals)
        clock.lap("scoring")
        metrics |= self.train(batch) | learning_rates | {"objective/kl_coef": self.kl.value}
        clock.lap("training")
        samples_per_rollout = self.stage.plan.rollout_per_rank * world_size()
        self.kl = self.kl.update(metrics["objective/kl"], samples_per_rollout)
        self.update += self.stage.plan.updates_per_rollout
        self.iteration += 1
        metrics |= clock.seconds
        self.stage.metrics.log(self.update, self.iteration * samples_per_rollout, metrics)
        return metrics

    def sample(self, batches: list[list[PromptExample]], draw: int, kind: int = 0) -> tuple[Rollout, ResponseTexts]:
        """Responses to prompts, generation batch by generation batch.

        Args:
            batches: prompts.
            draw: number of the iteration; the seed of sampling follows from it, the run's seed and the rank.
            kind: 0 for training, 1 for evaluation, 3 for the self-check.
        """
        actor = self.models.actor
        actor.eval()
        rollouts = []
        with actor.gathered() as policy:
            for number, examples in enumerate(batches):
                prompts = collate_prompts(examples, self.sampling.pad_id)
                prompts = {name: x.to(device()) for name, x in prompts.items()}
                seed = derive_seed(self.config.seed, kind, draw, rank(), number)
                rollouts.append(generate(policy.causal_lm, prompts, self.sampling, seed))
        rollout = concatenate(rollouts, self.sampling.pad_id)
        examples = [example for batch in batches for example in batch]
        return rollout, ResponseTexts(
            [example.prompt_text for example in examples],
            decode_responses(rollout, self.tokenizer),
            [example.row for example in examples],
        )

    def score(self, rollout: Rollout, text: ResponseTexts) -> tuple[Trajectory, Tensor | None]:
        """Scores, log-probs, values; and the metric function's numbers (B,), if there is one."""
        models = self.models
        for engine in (models.actor, models.critic):
            engine.eval()
        trajectory = score(
            rollout,
            models.reward(rollout, text),
            models.actor,
            models.reference,
            models.critic,
            self.log_prob_temperature,
            max(self.config.per_device_generation_batch_size, self.config.per_device_eval_batch_size),
        )
        return trajectory, models.metric(rollout, text) if models.metric else None

    def assign_credit(self, trajectory: Trajectory, ends: Tensor) -> PPOBatch:
        """Macro actions, advantages and returns, given where macro actions end: (B, R) bool."""
        config = self.config
        batch = ppo_batch(
            trajectory,
            ends,
            kl_coef=self.kl.value,
            gamma=config.gamma,
            lam=config.lam,
            value_function=config.value_function,
            macro_reward=config.macro_reward,
            kl_estimator=config.kl_estimator,
            clip_reward_value=config.clip_reward_value,
            missing_eos_penalty=config.missing_eos_penalty,
        )
        return whiten_advantages(batch) if config.whiten_advantages else batch

    def train(self, batch: PPOBatch) -> dict[str, float]:
        """The optimiser updates of one iteration."""
        actor, critic = self.models.actor, self.models.critic
        actor.train()
        critic.train()
        seed = derive_seed(self.config.seed, 2, self.iteration)
        metrics = ppo_update(actor, critic, batch, self.update_settings, seed)
        if self.average is not None:
            self.average.update()
        for name in ("loss/policy", "loss/value"):
            check_number(name, metrics[name], self.update)
        for name, engine in (("actor", actor), ("critic", critic)):
            if not engine.skipped:
                check_number(f"grad_norm/{name}", engine.grad_norm, self.update)
        return metrics


def total_updates(num_prompts: int, config: Any, plan: Any) -> int:
    """Optimiser updates of the whole run: an incomplete last rollout is dropped in every epoch.

    Raises:
        UserError: fewer prompts than one rollout.
    """
    rollout = plan.rollout_per_rank * plan.world_size
    rollouts = num_prompts // rollout
    if rollouts == 0:
        raise UserError(
            f"--data_path: {num_prompts} prompts are fewer than one rollout of {rollout}. Lower "
            "--per_device_generation_batch_size or --generation_batches, or give more data."
        )
    return rollouts * plan.updates_per_rollout * config.num_train_epochs


def decode_responses(rollout: Rollout, tokenizer: Any) -> list[str]:
    """The text of every response, special tokens removed."""
    return [decode_response(tokenizer, ids) for ids in rollout.response_rows()]


def derive_seed(*parts: int) -> int:
    """A 32-bit seed that depends on all parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
