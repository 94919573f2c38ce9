# SPDX-License-Identifier: Apache-2.0
"""Step 3, PPO over macro actions: collect a rollout, assign credit, update actor and critic.

`PPO.iterate` is the table of contents. One iteration, from prompts to the optimiser's step:

1. ppo/collect.py: samples responses to this rank's prompts. The rollout engine is by default rollouts/continuous.py.
2. ppo/score.py: scores them, computes log-probs and values, and cuts them into macro actions: a `ScoredBatch`.
3. ppo/credit.py: `assign_credit` computes advantages and returns as the flags say, before the update or from its own
   forward passes, by an estimator of `macro_actions.estimators` (`gae_batch`).
4. ppo/update.py: `ppo_update` shuffles rows into updates and micro-batches, and steps the optimisers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import torch
from transformers import PreTrainedTokenizerBase

from dschat.data.examples import PromptExample
from dschat.data.tokenised import lengths_of
from dschat.engine.process_group import training_dtype
from dschat.models.engines import Trained
from dschat.models.layout import Lengths
from dschat.rollouts.continuous import decoding_bytes
from dschat.rollouts.engine import Generation
from dschat.rollouts.termination import TerminationCondition
from dschat.run.distributed import is_main
from dschat.run.output import Run
from dschat.run.peaks import own_gpu
from dschat.run.state import Json, Progress, SeedKind, derive_seed, random_states
from dschat.scoring.source import ResponseTexts
from dschat.settings.batches import BatchPlan
from dschat.settings.ppo import PPOConfig
from dschat.settings.rollouts import sampling_lengths
from dschat.training.alarms import Alarms
from dschat.training.evaluation import Sample, show_samples
from dschat.training.iteration import Clock, Iteration, Metrics, pass_size, state_with
from dschat.training.loop import Algorithm, Work, work_of
from dschat.training.nonfinite import SKIPPED_NONFINITE, NonFinite
from dschat.training.ppo.collect import (
    ActorSampler,
    Collector,
    RolloutSampler,
    RolloutWork,
    ScoringCollector,
    build_actor_sampler,
)
from dschat.training.ppo.credit import Credit, assign_credit, with_scores
from dschat.training.ppo.evaluation import evaluate_responses
from dschat.training.ppo.metrics import critic_gate, external_metrics, normalised_metrics, rollout_metrics
from dschat.training.ppo.models import MovingAverage, PPOModels, trained_engines
from dschat.training.ppo.score import ExternalStats, RolloutScorer, ScoredBatch, ScoredRows
from dschat.training.ppo.update import Update, UpdateContext, ppo_update, trained_lengths, updates_of_rollout
from dschat.training.rehearsal import filled_rollout, rehearsal, rows_of
from dschat.training.rollout_check import check_rollout
from dschat.training.scalar_check import check_scalar
from dschat.training.throughput import ROLLOUT_SPEEDS, Throughput
from macro_actions.estimators import Estimator
from macro_actions.rewards import ScoreMoments, kl_controller
from macro_actions.segments import segment
from macro_actions.types import MacroActions, PPOBatch, Rollout, ScoredRollout, Trajectory, select_rows, tensors_of


def build_sampler(
    actor: ActorSampler,
    prompts: Sequence[PromptExample],
    config: PPOConfig,
    plan: BatchPlan,
    prompts_of_iteration: Callable[[int], list[int] | None],
) -> RolloutSampler:
    """What samples the responses of an iteration.

    `prompts_of_iteration` gives the positions of this rank's prompts in an iteration; None after the last.
    """
    if config.vllm.rollouts_ahead:
        from dschat.training.ppo.ahead import AheadSampler

        return AheadSampler(actor, prompts, plan.samples_per_prompt, prompts_of_iteration)
    return RolloutSampler(actor, prompts, plan.samples_per_prompt)


def build_collector(
    sampler: RolloutSampler,
    actor: ActorSampler,
    scorer: RolloutScorer,
    prompts: Sequence[PromptExample],
    config: PPOConfig,
    plan: BatchPlan,
) -> Collector:
    """The stages that collect a run's rollouts, see ppo/collect.py."""
    samples = plan.samples_per_prompt
    collector: Collector = ScoringCollector(sampler, scorer, samples, config.credit_is_fused(plan))
    if config.advantages.refill_rounds:
        from dschat.training.ppo.refill import RefillCollector

        collector = RefillCollector(collector, actor, scorer, prompts, config, plan)
    if config.advantages.needs.segment_values:
        from dschat.training.ppo.segment_values import SegmentValueCollector

        part_rows = config.sampling.per_device_generation_batch_size * samples
        collector = SegmentValueCollector(collector, actor, scorer.models.reward, prompts, config, part_rows)
    return collector


def build_nonfinite(config: PPOConfig, run: Run) -> NonFinite:
    """The checks of a run's numbers, with remedies that depend on its sources of scores."""
    remedies = config.rewards.score_remedies
    if config.advantages.needs.segment_values:  # values are then scores of completions
        remedies = remedies | {"values": " ".join(remedies.values())}
    return NonFinite(config.optimisation.on_nonfinite, run, remedies)


def build_alarms(config: PPOConfig, plan: BatchPlan) -> Alarms:
    """The warnings of symptoms such as a gamed reward or a KL that is too large."""
    return Alarms(
        config.flat(),
        config.output.eval_interval,
        plan.global_responses,
        reads_scores=config.advantages.needs.scores,
        scale_matters=not config.scores_are_rescaled,
    )


def build_throughput(config: PPOConfig, run: Run, models: PPOModels) -> Throughput:
    """The metrics of speed. vLLM's decoding has no fixed number of rows, so that its bandwidth is not measured."""
    rows = config.sampling.per_device_generation_batch_size * run.plan.samples_per_prompt
    return Throughput(
        models.trained.values(),
        own_gpu(training_dtype(config.engine.dtype)),
        None if config.rollouts.uses_vllm else rows,
    )


class PPO(Algorithm):
    """Trains the actor and, unless the estimator works without one, the critic."""

    name = "ppo"
    shown: Mapping[str, str] = {"scores": "objective/scores", "kl": "objective/kl"}
    checks_trained = False

    def __init__(
        self,
        models: PPOModels,
        prompts: Sequence[PromptExample],
        held_out: Sequence[PromptExample],
        tokenizer: PreTrainedTokenizerBase,
        condition: TerminationCondition,
        config: PPOConfig,
        run: Run,
        average: MovingAverage | None = None,
        *,
        estimator: Estimator | None = None,
        sampler: ActorSampler | None = None,
    ) -> None:
        """Connects the parts of a run.

        Args:
            models: engines and score sources.
            prompts: training prompts.
            held_out: prompts of evaluations.
            tokenizer: the actor's tokenizer.
            condition: decides where macro actions end.
            config: the flags.
            run: batch sizes and the output folder.
            average: the actor's moving average, updated after every iteration.
            estimator: estimator of advantages that replaces the one of --advantage_estimator.
            sampler: sampler that replaces the one that the flags ask for.
        """
        self.models = models
        critic_columns = {} if models.critic is None else {"explained": "val/explained_variance"}
        self.columns = critic_columns | ROLLOUT_SPEEDS
        self.prompts = prompts
        self.held_out = held_out[: config.num_eval_prompts or None]
        self.tokenizer = tokenizer
        self.config = config
        self.plan = run.plan
        self.average = average
        self.estimator = estimator
        self.lengths: Sequence[int] = lengths_of(prompts)
        self.work_batch = config.sampling.per_device_generation_batch_size

        # The parts that collect a rollout.
        if sampler is None:
            sampler = build_actor_sampler(models, tokenizer, config)
        self.sampler = sampler
        self.scorer = RolloutScorer(models, condition, tokenizer, config, pass_size(run.plan).without_gradient)
        self.responses = build_sampler(sampler, prompts, config, run.plan, self.prompts_of_iteration)
        self.collector = build_collector(self.responses, sampler, self.scorer, prompts, config, run.plan)

        # The parts that watch the run.
        self.nonfinite = build_nonfinite(config, run)
        self.alarms = build_alarms(config, run.plan)
        self.throughput = build_throughput(config, run, models)

        # State that changes from iteration to iteration and is saved in checkpoints.
        self.current: Iteration[ScoredRows] | None = None  # the iteration between its rollout and its last update
        self.kl = kl_controller(config.kl.kl_coef, config.kl.adaptive_kl_target, config.kl.adaptive_kl_horizon)
        self.moments = ScoreMoments() if config.advantages.normalize_scores else None

    def iterate(self, work: Work, iteration: int) -> Metrics:
        """One PPO iteration: collect a rollout, assign credit, check it, update, measure."""
        clock = Clock()

        if self.current is None:
            # 1. Sample responses, score them, cut them into macro actions.
            batch = self.collect(work, iteration, clock)
            moments = self.moments_with(batch.rows)

            # 2. Assign credit: now, or in the update's own forward passes.
            credit = self.credit_of(batch.rows, moments)

            # 3. Leave the rollout out if numbers are not finite.
            self.current = self.finish_rollout(batch, credit, iteration, clock)
            self.responses.accept()
            if self.current is None:
                return {SKIPPED_NONFINITE: float(len(self.updates_of(batch.rows.rollout, iteration)))}
        else:
            # A resumed iteration has its rollout already; credit is computed again.
            moments = self.moments_with(self.current.batch)
            credit = self.credit_of(self.current.batch, moments)

        # 4. Update actor and critic, or the critic alone.
        remaining = self.updates_of(self.current.batch.rollout, iteration)[self.current.progress.steps :]
        trained = trained_lengths(
            remaining, Lengths.of(self.current.batch.rollout).totals, self.models.critic is not None
        )
        metrics = self.current.metrics | self.update(self.current, credit, iteration)
        clock.record("training")

        # 5. Metrics of the rollout, the next KL coefficient and the moments of all scores so far.
        metrics |= self.throughput.trained(trained, clock.seconds["time/training"])
        is_credit_known = credit.is_known or SKIPPED_NONFINITE not in metrics
        if is_credit_known:
            metrics |= self.metrics_of_rollout(credit.whole(), moments)
            if not self.warms_up(iteration):
                self.kl = self.kl.update(metrics["objective/kl"], self.plan.global_responses)
        self.moments = moments
        self.current = None
        return metrics | clock.seconds

    def moments_with(self, rows: ScoredRows) -> ScoreMoments | None:
        """Running moments of all scores, those of a rollout included; None without --normalize_scores."""
        return None if self.moments is None else with_scores(self.moments, rows.scored)

    def metrics_of_rollout(self, batch: PPOBatch, moments: ScoreMoments | None) -> Metrics:
        """Metrics of a whole rollout with its advantages; `moments` are those of `moments_with`."""
        estimator = self.config.estimator
        metrics = rollout_metrics(batch, estimator.lam, estimator.lam_alpha)
        if self.config.advantages.needs.gates_critic and self.estimator is None:
            gate = critic_gate(batch, estimator)
            metrics |= gate.metrics()
        return metrics | normalised_metrics(moments, metrics["objective/scores"])

    def warms_up(self, iteration: int) -> bool:
        """Whether an iteration trains the critic alone (--critic_warmup_updates)."""
        return iteration * self.plan.updates_per_rollout < self.config.optimizers.critic_warmup_updates

    def trained_in(self, iteration: int) -> dict[str, Trained]:
        """The engines that an iteration trains, by name."""
        return trained_engines(self.models.actor, self.models.critic, self.warms_up(iteration))

    def collect(self, work: Work, iteration: int, clock: Clock) -> ScoredBatch:
        """This rank's rollout of an iteration, scored and cut into macro actions. Every rank must call it."""
        epoch = iteration // (len(self.prompts) // self.plan.global_rollout)
        prompt_numbers = [number for numbers in work for number in numbers]
        return self.collector.collect(RolloutWork(iteration, epoch, prompt_numbers, self.moments, clock))

    def prompts_of_iteration(self, iteration: int) -> list[int] | None:
        """Positions of this rank's prompts in an iteration; None after the last."""
        work = work_of(self, self.config, self.plan, iteration)
        if work is None:
            return None
        return [number for numbers in work for number in numbers]

    def credit_of(self, rows: ScoredRows, moments: ScoreMoments | None) -> Credit:
        """Advantages of a rollout, computed now or in the update's forward passes.

        Args:
            rows: the scored rollout.
            moments: running moments of all scores, this rollout's included.
        """
        if rows.logprobs is None:
            return Credit(rows, lambda trajectory, macro: self.credit(trajectory, macro, moments=moments))
        samples = self.plan.samples_per_prompt
        return Credit(self.credit(rows.trajectory, rows.macro, samples, moments))

    def credit(
        self, trajectory: Trajectory, macro: MacroActions, samples: int = 1, moments: ScoreMoments | None = None
    ) -> PPOBatch:
        """Advantages and, with a critic, returns, with this iteration's KL coefficient; see `assign_credit`."""
        return assign_credit(trajectory, macro, self.kl.value, self.config, samples, moments, self.estimator)

    def finish_rollout(
        self, batch: ScoredBatch, credit: Credit, iteration: int, clock: Clock
    ) -> Iteration[ScoredRows] | None:
        """The iteration, ready for its updates; None if numbers of its rollout are not finite.

        Args:
            batch: the collected rollout.
            credit: its advantages.
            iteration: number of the iteration.
            clock: clock of the iteration.
        """
        first_update = iteration * self.plan.updates_per_rollout
        if self.nonfinite.check_rollout(credit.checked, first_update, batch.bad_rows, batch.stats.auxiliary):
            return None
        metrics = external_metrics(batch.stats)
        if batch.rows.rollout.drawn_logprobs is not None:
            from dschat.training.ppo.logprob_gap import check_gap

            metrics |= check_gap(
                batch.rows.rollout,
                batch.rows.logprobs,
                self.models.actor,
                self.config.sampling.temperature,
                pass_size(self.plan),
                batch.is_stale,
                must_be_close=self.config.rollouts.uses_vllm,
            )
        clock.record("scoring")
        if self.config.vllm.rollouts_ahead:  # the time of sampling is not this process's
            metrics["rollout/staleness"] = float(batch.is_stale)
        else:
            metrics |= self.throughput.sampled(clock.sampled, clock.seconds["time/generation"])
        for name, engine in self.trained_in(iteration).items():
            metrics[f"lr/{name}"] = engine.learning_rate
        if self.warms_up(iteration):
            metrics["val/critic_warmup"] = float(self.plan.updates_per_rollout)
        metrics["objective/kl_coef"] = self.kl.value
        return Iteration(batch.rows, metrics | clock.seconds, random_states())

    def update(self, current: Iteration[ScoredRows], credit: Credit, iteration: int) -> Metrics:
        """Runs the remaining optimiser updates of an iteration."""
        engines = self.trained_in(iteration)
        first_update = iteration * self.plan.updates_per_rollout
        for engine in engines.values():
            engine.train()

        context = self.context(credit, self.warms_up(iteration))

        def is_left_out(done: int, update: Update) -> bool:
            # Fused credit is complete after the forward passes of the first update.
            if done == 0 and self.nonfinite.check_rollout(credit.whole(), first_update):
                return True
            rows = torch.as_tensor(update.rows, device=context.device)
            return self.nonfinite.check_update(
                context.engines(update),
                first_update + current.progress.updates,
                lambda: tensors_of(select_rows(credit.whole(), rows)),
            )

        metrics = ppo_update(
            context,
            derive_seed(self.config.optimisation.seed, SeedKind.SHUFFLE, iteration),
            current.progress,
            is_left_out,
        )
        if self.average is not None:
            self.average.update()
        return metrics

    def updates_of(self, rollout: Rollout, iteration: int) -> list[Update]:
        """The optimiser steps of an iteration, in order."""
        seed = derive_seed(self.config.optimisation.seed, SeedKind.SHUFFLE, iteration)
        rows = len(rollout.response_mask)
        return updates_of_rollout(rows, self.plan, self.config, seed, self.warms_up(iteration))

    def context(self, credit: Credit, critic_alone: bool = False) -> UpdateContext:
        """What the updates of a rollout read, with this iteration's KL coefficient if the KL is a term of the loss."""
        kl_coef = self.kl.value if self.config.loss.kl_in == "loss" else 0.0
        return UpdateContext(
            self.models.actor, self.models.critic, credit, self.config, self.plan, kl_coef, critic_alone
        )

    def evaluate(self) -> tuple[Metrics, list[Sample]]:
        """Means over the held-out prompts, with the same seeds every time; {} without such prompts."""
        if not self.held_out:
            return {}, []
        metrics, samples = evaluate_responses(
            self.held_out,
            self.tokenizer,
            sample=lambda examples: self.sampler.sample(examples, SeedKind.EVALUATION, occasion=0),
            score=self.score_with_credit,
        )
        if self.config.rollouts.print_answers and is_main():
            show_samples(samples)
        return metrics, samples

    def score_with_credit(self, generation: Generation, texts: ResponseTexts) -> tuple[PPOBatch, ExternalStats]:
        """Scores sampled responses and computes advantages, for evaluations and the self-check."""
        scored = self.scorer.score_rollout(generation, texts)
        batch = self.credit(scored.rows.trajectory, scored.rows.macro, moments=self.moments)
        return batch, scored.stats

    def self_check(self) -> None:
        """Checks models and sampling by a few forward passes on two prompts.

        Raises:
            UserError: a model is computed wrongly, or sampling does not follow the flags.
        """
        generation, texts = self.sampler.sample(self.prompts[:2], SeedKind.SELF_CHECK, occasion=0)
        batch, _ = self.score_with_credit(generation, texts)
        check_rollout(self.models.actor, batch.trajectory, self.sampler.sampling, generation.logprobs)
        tokens = (generation.rollout.input_ids, generation.rollout.attention_mask)
        for model in (self.models.critic, self.models.reward.model):
            if model is not None:
                check_scalar(model, tokens, self.sampler.sampling.pad_id)

    def rehearse(self) -> None:
        """Trains on the longest micro-batch that may come, without changing anything; memory runs out now or never."""
        longest = max(range(len(self.prompts)), key=self.lengths.__getitem__)
        prompt = self.lengths[longest]
        if self.config.has_episodes:  # environments write the prompts
            prompt = self.config.sampling.max_prompt_seq_len
        response = self.config.sampling.max_answer_seq_len
        rows = rows_of(pass_size(self.plan), prompt + response)
        credit = self.rehearsed_credit(filled_rollout(self.prompts[longest].prompt_ids, rows, prompt, response))

        # Completions of segment_mc and later turns continue all but the last token of a sequence.
        sampled_length = sum(sampling_lengths(self.config, prompt, response))
        responses = self.plan.rollout_per_rank * self.plan.samples_per_prompt
        memory = decoding_bytes(self.models.rollouts, self.models.actor, responses, sampled_length)

        plan = replace(self.plan, update_per_rank=rows)
        config = self.config.changed(ppo_epochs=1, critic_epochs=1, critic_minibatches=1)
        context = replace(self.context(credit), config=config, plan=plan)
        with rehearsal(self.models.trained, rows, prompt + response, "per_device_training_batch_size", memory):
            ppo_update(context, seed=0)

    def rehearsed_credit(self, rollout: Rollout) -> Credit:
        """Credit of a rollout whose rows are one macro action each and whose log-probs, values and scores are 0."""
        zeros = torch.zeros_like(rollout.response_mask, dtype=torch.float32)
        macro = segment(torch.zeros_like(rollout.response_mask), rollout.response_mask)
        teacher_logprobs = zeros if self.config.has_teacher else None
        scored = ScoredRollout(rollout, zeros, zeros[:, 0], teacher_logprobs=teacher_logprobs)
        if self.config.credit_is_fused(self.plan):
            return self.credit_of(ScoredRows(scored, macro), None)
        values = None if self.models.critic is None else zeros
        return Credit(PPOBatch(scored.with_numbers(zeros, values), macro, zeros, zeros, zeros, values))

    def why_stop(self, metrics: Metrics, update: int, may_stop: bool) -> str | None:
        return self.alarms.check(metrics, update, may_stop)

    def state_dict(self) -> Progress:
        numbers: Json = {
            "kl": self.kl.value,
            "alarms": self.alarms.state_dict(),
            "scores": None if self.moments is None else asdict(self.moments),
        }
        sampled_numbers, sampled_tensors = self.responses.state()
        state = state_with(numbers, self.current)
        return replace(state, tensors=state.tensors | sampled_tensors, rollout=state.rollout | sampled_numbers)

    def load_state_dict(self, state: Progress) -> None:
        numbers = state.numbers
        self.kl = replace(self.kl, value=numbers["kl"])
        self.alarms.load_state_dict(numbers["alarms"])
        if self.moments is not None:
            self.moments = ScoreMoments(**numbers["scores"])
        self.responses.load(state)
        if "current" in state.rollout:
            self.current = Iteration.from_state(state, ScoredRows)
