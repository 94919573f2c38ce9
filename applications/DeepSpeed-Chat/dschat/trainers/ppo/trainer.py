# SPDX-License-Identifier: Apache-2.0
"""Step 3, PPO over macro actions: sample, score, find where macro actions end, assign credit, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.common.progress import Bar, progress
from dschat.conditions.termination import TerminationCondition
from dschat.config.ppo import PPOConfig
from dschat.data.collate import update_batches
from dschat.data.examples import PromptExample
from dschat.data.stored import lengths_of
from dschat.errors import UserError
from dschat.models.tokenizer import end_ids_of
from dschat.rl.estimators import Estimator
from dschat.rl.macro_actions import segment
from dschat.rl.rewards import ScoreMoments, kl_controller
from dschat.rl.types import MacroActions, PPOBatch, ScoredRollout, Trajectory, select_rows, tensors_of
from dschat.rollouts.engine import Drawn
from dschat.rollouts.sampling import Sampling
from dschat.run.checkpoint import Checkpoints
from dschat.run.distributed import is_main, rank, world_size
from dschat.run.model_folders import ModelFolders, evaluation_after_saving
from dschat.run.output import Run, due
from dschat.run.progress import Json, Progress
from dschat.run.random_states import random_states, set_random_states
from dschat.run.seeds import SeedKind, derive_seed
from dschat.scoring.source import Measured, ResponseTexts
from dschat.trainers.checks import COUNTED, NonFinite
from dschat.trainers.ppo.alarms import Alarms
from dschat.trainers.ppo.clock import Clock
from dschat.trainers.ppo.credit import assign_credit, with_scores
from dschat.trainers.ppo.evaluation import evaluate, show_samples, write_samples
from dschat.trainers.ppo.iteration import Iteration
from dschat.trainers.ppo.late_credit import LateCredit, PendingBatch
from dschat.trainers.ppo.logprob_gap import check_gap
from dschat.trainers.ppo.metrics import normalised_metrics, outside_metrics, rollout_metrics
from dschat.trainers.ppo.models import Beside, PPOModels
from dschat.trainers.ppo.moving_average import MovingAverage
from dschat.trainers.ppo.sampler import ActorSampler
from dschat.trainers.ppo.update import UpdateSettings, ppo_update, total_updates
from dschat.trainers.selfcheck import check_rollout, check_scalar


class PPOTrainer:
    """Trains the actor and, where there is one, the critic; everything it needs is handed in."""

    def __init__(
        self,
        models: PPOModels,
        prompts: Sequence[PromptExample],
        held_out: Sequence[PromptExample],
        tokenizer: PreTrainedTokenizerBase,
        condition: TerminationCondition,
        config: PPOConfig,
        run: Run,
        folders: ModelFolders,
        checkpoints: Checkpoints,
        average: MovingAverage | None = None,
        *,
        estimator: Estimator | None = None,
    ) -> None:
        """Takes the parts of a run.

        Args:
            models: engines and score sources.
            prompts: of training.
            held_out: of evaluation.
            tokenizer: the actor's.
            condition: where macro actions end.
            config: the flags.
            run: batch sizes, record and metrics.
            folders: saves the models.
            checkpoints: saves what the run needs to go on, and gives it back.
            average: moving average of the actor, updated after every iteration.
            estimator: of advantages; that of --advantage_estimator when None.
        """
        self.models, self.prompts, self.condition, self.tokenizer = models, prompts, condition, tokenizer
        self.config, self.run, self.folders, self.average = config, run, folders, average
        self.estimator = estimator
        self.checkpoints, self.nonfinite = checkpoints, NonFinite(config.on_nonfinite, run, config.score_remedies)
        self.alarms = Alarms.from_config(config, run.plan)
        self.held_out = held_out[: config.num_eval_prompts(world_size()) or None]
        sampling = Sampling.from_config(config, tokenizer, end_ids_of(models.actor.module.inner.generation_config))
        self.sample = ActorSampler(models.actor, tokenizer, sampling, config.seed, models.rollouts)
        self.update = self.iteration = 0  # those of finished iterations
        self.current: Iteration | None = None  # the one that is under way, from its first update on
        self.evaluated = -1  # after how many updates the last evaluation was
        # The global random states when `current` or `evaluated` last changed; users' functions may draw from them.
        self.random: dict[str, Tensor] = {}
        self.kl = kl_controller(config.kl_coef, config.adaptive_kl_target, config.adaptive_kl_horizon)
        self.moments = ScoreMoments() if config.normalize_scores else None
        self.update_settings = UpdateSettings.from_config(config, run.plan)

    def fit(self) -> dict[str, float]:
        """Trains to the end and saves; returns the last evaluation's metrics."""
        total = total_updates(len(self.prompts), self.config, self.run.plan)
        self.random = random_states()
        self.go_on(self.checkpoints.load())
        with self.checkpoints.stopping(self.progress):
            if self.config.self_checks and self.progress().update == 0:
                self.self_check()
                set_random_states(self.random)
            with progress(total, "ppo", self.update, not is_main(), "update") as bar:
                self._train_all(total, bar)
            if self.config.save_steps:
                self.checkpoints.save(self.progress())
            self.folders.save_final()
            with evaluation_after_saving(self.config.output_dir):
                result = self.evaluate()
        self.folders.describe_final()
        return result

    def progress(self) -> Progress:
        """Where the run is."""
        numbers: Json = {"iteration": self.iteration, "evaluated": self.evaluated, "kl": self.kl.value}
        numbers |= {"alarms": self.alarms.state(), "scores": self.moments and asdict(self.moments)}
        if self.current is None:
            return Progress(self.update, numbers, self.random)
        state, tensors = self.current.state()
        return Progress(self.update + self.current.updates.done, numbers | {"current": state}, self.random, tensors)

    def go_on(self, progress: Progress | None) -> None:
        """Takes the run up where it was; None leaves it at its beginning."""
        if progress is None:
            return
        numbers, self.random = progress.numbers, progress.random
        self.update, self.iteration, self.evaluated = progress.update, numbers["iteration"], numbers["evaluated"]
        self.kl = replace(self.kl, value=numbers["kl"])
        self.alarms.go_on(numbers["alarms"])
        self.moments = self.moments and ScoreMoments(**numbers["scores"])
        if "current" in numbers:
            self.current = Iteration.from_state(numbers["current"], progress.tensors)
            self.update -= self.current.updates.done

    def self_check(self) -> None:
        """A few forward passes on two prompts, before anything is trained or measured.

        Raises:
            UserError: a model is computed wrongly, or sampling is not what was asked for.
        """
        drawn, texts = self.sample(self.prompts[:2], SeedKind.SELF_CHECK, draw=0)
        trajectory = self.score(drawn, texts)[0]
        check_rollout(self.models.actor, trajectory, self.sample.sampling, drawn.logprobs)
        tokens = (drawn.rollout.input_ids, drawn.rollout.attention_mask)
        for model in (self.models.critic, self.models.reward.model):
            if model is not None:
                check_scalar(model, tokens, self.sample.sampling.pad_id)

    def evaluate(self) -> dict[str, float]:
        """Means over the held-out prompts, the same draws every time; {} without such prompts."""
        if not self.held_out:
            return {}
        metrics, samples = evaluate(
            self.held_out,
            self.tokenizer,
            sample=lambda examples: self.sample(examples, SeedKind.EVALUATION, draw=0),
            score=self.score,
            assign_credit=lambda trajectory: self.credit(
                trajectory, segment(self.condition(trajectory, 0).ends, trajectory.response_mask)
            ),
        )
        self.run.metrics.log(self.update, self.iteration * self.run.plan.global_responses, metrics)
        self.run.record.measured(metrics, self.update)
        self.evaluated, self.random = self.update, random_states()
        if is_main():
            write_samples(self.run.folder, self.update, samples)
            self.run.metrics.show_samples(self.update, samples)
            if self.config.print_answers:
                show_samples(samples)
        self.nonfinite.in_evaluation(metrics, self.update)
        return metrics

    def _train_all(self, total: int, bar: Bar) -> None:
        config, per_epoch = self.config, len(self.prompts) // self.run.plan.global_rollout
        self._evaluate_if_due(total)
        for epoch in range(self.iteration // per_epoch, config.num_train_epochs):
            rollouts = update_batches(
                lengths_of(self.prompts),
                self.run.plan.global_rollout,
                config.per_device_generation_batch_size,
                config.seed,
                epoch,
                rank=rank(),
                world_size=world_size(),
            )
            for batches in rollouts[self.iteration % per_epoch :]:
                before = self.update
                metrics = self.iterate(batches, epoch)
                shown = {name: metrics.get(f"objective/{name}", math.nan) for name in ("scores", "kl")}
                bar.set_postfix({name: f"{number:.3f}" for name, number in shown.items()})
                bar.update(self.update - before)
                why_stop = self.alarms.look(metrics, self.update, may_stop=self.update < total)
                if why_stop or due(config.save_models, before, self.update):
                    self.folders.save_after(self.update)
                if (why_stop or due(config.save_steps, before, self.update)) and self.update < total:
                    self.checkpoints.save(self.progress())
                if why_stop:
                    raise UserError(why_stop)
                self._evaluate_if_due(total)

    def _evaluate_if_due(self, total: int) -> None:
        """Before the first update, and every --eval_interval; the evaluation of the end is not this one's business."""
        before = self.update - self.run.plan.updates_per_rollout
        is_due = self.update == 0 or due(self.config.eval_interval, before, self.update)
        if is_due and self.current is None and self.update < total and self.evaluated < self.update:
            self.evaluate()

    def iterate(self, batches: list[list[int]], epoch: int) -> dict[str, float]:
        """One PPO iteration on the prompts of ``batches`` (generation batches of prompt numbers)."""
        if self.current is None:
            self.current, self.random = self.collect(batches, epoch), random_states()
        clock = Clock()
        if self.current is None:
            metrics = {COUNTED: float(self.run.plan.updates_per_rollout)}
        else:
            metrics = self.current.metrics | self.train(self.current)
            metrics |= normalised_metrics(self.moments, metrics.get("objective/scores"))
            clock.lap("training")
        if "objective/kl" in metrics:
            self.kl = self.kl.update(metrics["objective/kl"], self.run.plan.global_responses)
        self.update += self.run.plan.updates_per_rollout
        self.iteration += 1
        self.current = None
        metrics |= clock.seconds
        self.run.metrics.log(self.update, self.iteration * self.run.plan.global_responses, metrics)
        return metrics

    def collect(self, batches: list[list[int]], epoch: int) -> Iteration | None:
        """Samples and scores; an iteration without updates so far. None if it must be left out."""
        clock = Clock()
        models, plan, samples = self.models, self.run.plan, self.run.plan.samples_per_prompt
        rates = {f"lr/{name}": engine.learning_rate for name, engine in models.trained.items()}
        prompts = [self.prompts[i] for rows in batches for i in rows]
        drawn, texts = self.sample(prompts, SeedKind.TRAINING, self.iteration, samples)
        clock.lap("generation")
        scored, beside, measured = models.score(drawn.rollout, texts, self.config.temperature, plan.micro_batch)
        seen = None if self.moments is None else with_scores(self.moments, scored)
        known = scored if self.credit_is_late else self.complete(scored, drawn)
        found = self.condition(known, epoch)
        macro = segment(found.ends, scored.response_mask)
        batch = (
            PendingBatch(known, macro)
            if isinstance(known, ScoredRollout)
            else self.credit(known, macro, samples, seen)
        )
        checked = batch if isinstance(batch, PPOBatch) else scored
        if self.nonfinite.in_rollout(checked, self.update, drawn.bad_rows, beside):
            return None
        metrics = outside_metrics(beside, found.totals, measured)
        metrics |= check_gap(known, models.actor, self.config.temperature, plan.micro_batch)
        if isinstance(batch, PPOBatch):
            metrics |= rollout_metrics(batch, self.config.lam)
        clock.lap("scoring")
        self.moments = seen  # not before: a run that is stopped above draws this rollout again
        return Iteration(batch, metrics | rates | {"objective/kl_coef": self.kl.value} | clock.seconds)

    @property
    def credit_is_late(self) -> bool:
        """Whether the update's own forward passes give log-probs and values; see `dschat.trainers.ppo.late_credit`."""
        return self.config.credit_is_late(self.run.plan)

    def score(self, drawn: Drawn, texts: ResponseTexts) -> tuple[Trajectory, Beside, Measured]:
        """Scores, log-probs, values; the numbers beside the scores; what scoring measured."""
        temperature, most = self.config.temperature, self.run.plan.micro_batch
        scored, beside, measured = self.models.score(drawn.rollout, texts, temperature, most)
        return self.complete(scored, drawn), beside, measured

    def complete(self, scored: ScoredRollout, drawn: Drawn) -> Trajectory:
        """Log-probs and values. In float32, the drawing pass has given the log-probs already; else it rounds more."""
        logprobs = drawn.logprobs if next(self.models.actor.module.parameters()).dtype == torch.float32 else None
        return self.models.complete(scored, self.config.temperature, self.run.plan.micro_batch, logprobs)

    def credit(
        self, trajectory: Trajectory, macro: MacroActions, samples: int = 1, seen: ScoreMoments | None = None
    ) -> PPOBatch:
        """Advantages and, of a critic, returns, where so many rows in succession are samples of a prompt."""
        moments = seen or self.moments
        return assign_credit(trajectory, macro, self.kl.value, self.config, samples, moments, self.estimator)

    def train(self, iteration: Iteration) -> dict[str, float]:
        """The optimiser updates of an iteration, those that are left."""
        models, engines, pending = self.models, self.models.trained, iteration.batch
        for engine in engines.values():
            engine.train()
        seed = derive_seed(self.config.seed, SeedKind.SHUFFLE, self.iteration)
        source = pending if isinstance(pending, PPOBatch) else LateCredit(pending, self.credit)

        def left_out(done: int, rows: Tensor) -> bool:
            batch = source if isinstance(source, PPOBatch) else source.batch()
            if isinstance(source, LateCredit) and self.nonfinite.in_rollout(batch, self.update):
                return True
            return self.nonfinite.in_update(engines, self.update + done, lambda: tensors_of(select_rows(batch, rows)))

        settings = self.update_settings
        metrics = ppo_update(models.actor, models.critic, source, settings, seed, iteration.updates, left_out)
        if isinstance(source, LateCredit) and COUNTED not in metrics:
            metrics |= rollout_metrics(source.batch(), self.config.lam)
        if self.average is not None:
            self.average.update()
        return metrics
