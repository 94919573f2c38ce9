# SPDX-License-Identifier: Apache-2.0
"""Step 3, PPO over macro actions: sample, score, find where macro actions end, assign credit, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.collate import further_examples
from dschat.data.encoding import decode_response
from dschat.data.examples import PromptExample
from dschat.data.tokenised import lengths_of
from dschat.models.layout import Lengths
from dschat.models.operations import Peaks
from dschat.models.tokenizer import end_ids_of
from dschat.rollouts.engine import Generation
from dschat.rollouts.termination import Ends, TerminationCondition
from dschat.run.distributed import interleave_over_ranks, is_main, rank, world_size
from dschat.run.output import Run
from dschat.run.state import Json, Progress, SeedKind, derive_seed, random_states
from dschat.scoring.segments import Segments
from dschat.scoring.source import ResponseTexts, scores_of
from dschat.settings.ppo import PPOConfig
from dschat.training.evaluation import Sample, evaluate_responses, show_samples
from dschat.training.iteration import Clock, Iteration, Metrics, pass_size, state_with
from dschat.training.loop import Algorithm, Work, work_of
from dschat.training.nonfinite import SKIPPED_NONFINITE, NonFinite
from dschat.training.ppo.ahead import RolloutAhead
from dschat.training.ppo.alarms import USUAL_INTERVAL, Alarms
from dschat.training.ppo.credit import assign_credit, trained_scores, with_scores
from dschat.training.ppo.models import ActorSampler, MovingAverage, PPOModels, actor_sampling, response_logprobs
from dschat.training.ppo.rollout_metrics import (
    Collected,
    Outside,
    normalised_metrics,
    outside_metrics,
    rollout_metrics,
)
from dschat.training.ppo.segment_values import SegmentValues
from dschat.training.ppo.update import FusedCredit, PendingBatch, ppo_update, rows_of_updates
from dschat.training.rehearsal import decoding_bytes, filled_rollout, rehearsal, rows_of
from dschat.training.selfcheck import check_gap, check_rollout, check_scalar
from dschat.training.throughput import Throughput, TrainedTexts
from macro_actions.conditions import at_most
from macro_actions.estimators import Estimator
from macro_actions.groups import refilled
from macro_actions.rewards import ScoreMoments, kl_controller
from macro_actions.segments import segment, to_tokens
from macro_actions.token_text import TokenReader, texts_of_macro_actions
from macro_actions.types import MacroActions, PPOBatch, Rollout, ScoredRollout, Trajectory, select_rows, tensors_of


class PPO(Algorithm):
    """Trains the actor and, where there is one, the critic; everything it needs is handed in."""

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
        peaks: Peaks | None = None,
    ) -> None:
        """Takes the parts of a run. The moving average is the actor's, updated after every iteration; the estimator is
        that of --advantage_estimator unless one is given; the peaks are those of this process's GPU.
        """
        self.models, self.prompts, self.condition, self.tokenizer = models, prompts, condition, tokenizer
        self.config, self.plan, self.average, self.estimator = config, run.plan, average, estimator
        self.lengths: Sequence[int] = lengths_of(prompts)
        self.work_batch = config.sampling.per_device_generation_batch_size
        self.held_out = held_out[: config.num_eval_prompts(world_size()) or None]
        remedies = config.rewards.score_remedies
        if config.advantages.needs.segment_values:  # which are scores
            remedies = remedies | {"values": " ".join(remedies.values())}
        self.nonfinite = NonFinite(config.optimisation.on_nonfinite, run, remedies)
        self.alarms = Alarms(
            config.alarms,
            config.output.eval_interval or USUAL_INTERVAL,
            run.plan.global_responses,
            checks_scale=not config.scores_are_rescaled,
        )
        own_ends = end_ids_of(models.actor.module.inner.generation_config)
        sampling = actor_sampling(config, tokenizer, own_ends)
        self.sample = ActorSampler(models.actor, tokenizer, sampling, config.optimisation.seed, models.rollouts)
        samples = run.plan.samples_per_prompt
        self.ahead = RolloutAhead(self.sample, samples) if config.vllm.rollouts_ahead else None
        self.reader = TokenReader(tokenizer)
        rows = config.sampling.per_device_generation_batch_size * samples
        self.segment_values = None
        if config.advantages.needs.segment_values:
            self.segment_values = SegmentValues(config.advantages.mc_samples, rows)
        self.throughput = Throughput(models.trained.values(), peaks, None if config.rollouts.uses_vllm else rows)
        self.scoring = pass_size(run.plan).without_gradient
        self.current: Iteration[PPOBatch | PendingBatch] | None = None  # under way, from its first update on
        self.kl = kl_controller(config.kl.kl_coef, config.kl.adaptive_kl_target, config.kl.adaptive_kl_horizon)
        self.moments = ScoreMoments() if config.advantages.normalize_scores else None

    def iterate(self, work: Work, iteration: int) -> Metrics:
        """One PPO iteration: collect → credit → update."""
        clock, updates = Clock(), self.plan.updates_per_rollout
        if self.current is None:
            collected = self.collect(work, iteration, clock)
            batch = self.credited(collected)
            self.current = self.accepted(collected, batch, iteration * updates, clock)
            if self.ahead is not None:
                self.ahead.accept()
            if self.segment_values is not None:
                self.segment_values.forget()
        if self.current is None:
            return {SKIPPED_NONFINITE: float(updates)}
        trained = self.texts_left(self.current, iteration)
        metrics = self.current.metrics | self.update(self.current, iteration)
        clock.lap("training")
        metrics |= self.throughput.trained(trained, clock.seconds["time/training"])
        if "objective/kl" in metrics:
            metrics |= normalised_metrics(self.moments, metrics["objective/scores"])
            self.kl = self.kl.update(metrics["objective/kl"], self.plan.global_responses)
        self.current = None
        return metrics | clock.seconds

    def collect(self, work: Work, iteration: int, clock: Clock) -> Collected:
        """Samples, scores, and finds where macro actions end."""
        models, plan = self.models, self.plan
        rates = {f"lr/{name}": engine.learning_rate for name, engine in models.trained.items()}
        prompts = [self.prompts[number] for rows in work for number in rows]
        ahead = None if self.ahead is None else self.ahead.take(prompts, iteration)
        drawn, texts = ahead or self.sample(prompts, SeedKind.TRAINING, iteration, plan.samples_per_prompt)
        if self.ahead is not None and (following := work_of(self, self.config, plan, iteration + 1)) is not None:
            self.ahead.begin([self.prompts[number] for rows in following for number in rows], iteration + 1)
        clock.lap("generation")
        clock.draws.append(Lengths.of(drawn.rollout))
        epoch = iteration // (len(self.prompts) // plan.global_rollout)
        known, macro, outside = self.judge(drawn, texts, epoch, self.credit_is_fused)
        found = Collected(known, macro, None, drawn.bad_rows, outside, rates, ahead is not None)
        if self.config.advantages.refill_rounds:
            found, prompts = self.refill(found, work, iteration, epoch, clock)
        known, macro, outside = found.rollout, found.macro, found.outside
        moments = None if self.moments is None else with_scores(self.moments, known)
        if self.segment_values is not None:
            clock.lap("scoring")
            known, tokens = self.with_segment_values(known, macro, prompts, iteration, moments)
            outside = replace(outside, totals={**outside.totals, "rollout/mc_tokens": tokens})
            clock.lap("completions")
        return replace(found, rollout=known, moments=moments, outside=outside)

    def refill(
        self, found: Collected, work: Work, iteration: int, epoch: int, clock: Clock
    ) -> tuple[Collected, list[PromptExample]]:
        """The same and its prompts, after further ones have taken the places of those whose responses all have the
        same score. What is left of these, --drop_equal_groups leaves out. Every rank must call it.

        A round fills the places of all ranks: which prompts are there does not depend on the number of ranks. It is a
        part of drawing: a run that is stopped here does it all again.
        """
        samples, size, filled, tokens = self.plan.samples_per_prompt, self.plan.global_rollout, 0, 0
        taken = interleave_over_ranks([number for rows in work for number in rows])
        numbers, own = taken, slice(rank(), None, world_size())
        seed = derive_seed(self.config.optimisation.seed, SeedKind.REFILL, iteration)

        def equal_everywhere(collected: Collected) -> Tensor:
            return torch.tensor(interleave_over_ranks(collected.equal_groups(samples).tolist()))

        for part in range(self.config.advantages.refill_rounds):
            equal = equal_everywhere(found)
            if not equal.any():
                break
            clock.lap("scoring")
            further = further_examples(len(self.prompts), taken, size, seed, part)
            prompts = [self.prompts[number] for number in further[own]]
            seed_of_round = derive_seed(iteration, part)
            drawn, texts = self.sample(prompts, SeedKind.REFILL, seed_of_round, samples, again=part > 0)
            clock.lap("generation")
            clock.draws.append(Lengths.of(drawn.rollout))
            known, macro, outside = self.judge(drawn, texts, epoch)
            others = Collected(known, macro, None, drawn.bad_rows, outside, {})
            groups = refilled(equal, equal_everywhere(others), world_size())
            found = found.refilled(others, groups, samples, self.sample.sampling.pad_id)
            numbers = [[*numbers, *further][group] for group in groups.tolist()]
            filled += int((groups[own] >= size).sum())
            tokens += int(drawn.rollout.response_mask.sum())
        totals = {**found.outside.totals, "rollout/refilled": filled, "rollout/refill_tokens": tokens}
        found = replace(found, outside=replace(found.outside, totals=totals))
        return found, [self.prompts[number] for number in numbers[own]]

    def judge(
        self, drawn: Generation, texts: ResponseTexts, epoch: int = 0, fused: bool = False
    ) -> tuple[Trajectory | ScoredRollout, MacroActions, Outside]:
        """Scores; log-probs and values, unless credit is fused; where macro actions end; and what else was measured.

        With --segment_rewards macro actions come first, since the sources are asked for them: the condition then knows
        no scores and no values.
        """
        temperature, found, macro, ref_logprobs = self.config.sampling.temperature, None, None, None
        if self.config.rewards.segment_rewards is not None:
            unscored = self.unscored(drawn)
            found, ref_logprobs = self.ends(unscored, epoch), unscored.ref_logprobs
            macro = segment(found.ends, unscored.response_mask)
            lengths = [[length for length in of_row if length] for of_row in macro.lengths.tolist()]
            decode = partial(decode_response, self.tokenizer)
            said = [
                texts_of_macro_actions(self.reader, decode, *one)
                for one in zip(texts.responses, drawn.rollout.response_rows(), lengths, strict=True)
            ]
            texts = replace(texts, segments=Segments(said, lengths, self.config.rewards.segment_rewards == "prefix"))
        known: Trajectory | ScoredRollout
        known, auxiliary, measured = self.models.score(
            drawn.rollout, texts, temperature, self.scoring, ref_logprobs, macro
        )
        if not fused:
            known = self.complete(known, drawn)
        if found is None:
            found = self.ends(known, epoch)
        return known, segment(found.ends, known.response_mask), Outside(auxiliary, found.totals, measured)

    def ends(self, known: Trajectory | ScoredRollout, epoch: int) -> Ends:
        """Where macro actions end; no more of them than completions are drawn from, where these are."""
        found = self.condition(known, epoch)
        if self.segment_values is None:
            return found
        return replace(found, ends=at_most(found.ends, known.response_mask, self.config.advantages.mc_max_segments))

    def with_segment_values(
        self,
        known: Trajectory | ScoredRollout,
        macro: MacroActions,
        prompts: Sequence[PromptExample],
        iteration: int,
        moments: ScoreMoments | None,
    ) -> tuple[Trajectory, int]:
        """The same with the values of the states before macro actions, and the tokens drawn to measure them."""
        assert self.segment_values is not None and isinstance(known, Trajectory)  # credit is not fused
        examples = [prompt for prompt in prompts for _ in range(self.plan.samples_per_prompt)]

        def score(rollout: Rollout, texts: ResponseTexts, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
            found = scores_of(self.models.reward(rollout, texts))
            scores = trained_scores(found.values.float(), rollout.finished, lengths, self.config, moments)
            return scores, found.missing

        values, tokens = self.segment_values(self.sample, known.rollout, macro, examples, iteration, score)
        return replace(known, values=to_tokens(values, macro)), tokens

    def unscored(self, drawn: Generation) -> Trajectory | ScoredRollout:
        """What a condition reads before there are scores, which are 0: the reference's log-probs and, if it asks for
        them, the policy's.
        """
        ref_logprobs = response_logprobs(
            self.models.reference, drawn.rollout, self.config.sampling.temperature, self.scoring
        )
        scored = ScoredRollout(drawn.rollout, ref_logprobs, ref_logprobs.new_zeros(len(ref_logprobs)))
        if not self.config.termination.reads_policy:
            return scored
        return self.complete(scored, drawn, replace(self.models, critic=None))

    def credited(self, collected: Collected) -> PPOBatch | PendingBatch:
        """Advantages and, of a critic, returns; or what is left until the update's own passes give what they need."""
        known, macro = collected.rollout, collected.macro
        if isinstance(known, ScoredRollout):
            return PendingBatch(known, macro)
        return self.credit(known, macro, self.plan.samples_per_prompt, collected.moments)

    def accepted(
        self, collected: Collected, batch: PPOBatch | PendingBatch, update: int, clock: Clock
    ) -> Iteration[PPOBatch | PendingBatch] | None:
        """An iteration without updates so far; None if numbers of its rollout are not finite."""
        checked = batch if isinstance(batch, PPOBatch) else batch.scored
        if self.nonfinite.in_rollout(checked, update, collected.bad_rows, collected.outside.auxiliary):
            return None
        metrics = outside_metrics(collected.outside)
        size, clip = pass_size(self.plan), self.config.vllm.rollout_is_clip
        metrics |= check_gap(
            collected.rollout, self.models.actor, self.config.sampling.temperature, size, clip, collected.is_stale
        )
        if self.ahead is not None:
            metrics["rollout/staleness"] = float(collected.is_stale)
        if isinstance(batch, PPOBatch):
            metrics |= rollout_metrics(batch, self.config.estimator.lam, self.config.estimator.lam_alpha)
        clock.lap("scoring")
        self.moments = collected.moments  # not before: a run that is stopped above draws this rollout again
        if clock.draws and self.ahead is None:  # what is sampled ahead takes time elsewhere
            metrics |= self.throughput.sampled(clock.draws, clock.seconds["time/generation"])
        metrics |= collected.rates | {"objective/kl_coef": self.kl.value} | clock.seconds
        return Iteration(batch, metrics, random_states())

    def update(self, current: Iteration[PPOBatch | PendingBatch], iteration: int) -> Metrics:
        """The optimiser updates of an iteration, those that are left."""
        models, engines, before = self.models, self.models.trained, iteration * self.plan.updates_per_rollout
        for engine in engines.values():
            engine.train()
        seed = derive_seed(self.config.optimisation.seed, SeedKind.SHUFFLE, iteration)
        batch = current.batch
        source = batch if isinstance(batch, PPOBatch) else FusedCredit(batch, self.credit)

        def left_out(done: int, rows: Tensor) -> bool:
            batch = source if isinstance(source, PPOBatch) else source.batch()
            if isinstance(source, FusedCredit) and self.nonfinite.in_rollout(batch, before):
                return True
            return self.nonfinite.in_update(engines, before + done, lambda: tensors_of(select_rows(batch, rows)))

        metrics = ppo_update(
            models.actor,
            models.critic,
            source,
            self.config,
            self.plan,
            seed,
            current.updates,
            self.kl_of_loss,
            left_out,
        )
        if isinstance(source, FusedCredit) and SKIPPED_NONFINITE not in metrics:
            metrics |= rollout_metrics(source.batch(), self.config.estimator.lam, self.config.estimator.lam_alpha)
        if self.average is not None:
            self.average.update()
        return metrics

    def texts_left(self, current: Iteration[PPOBatch | PendingBatch], iteration: int) -> TrainedTexts:
        """What the updates that are left of an iteration train on."""
        lengths = Lengths.of(current.batch.rollout)
        seed = derive_seed(self.config.optimisation.seed, SeedKind.SHUFFLE, iteration)
        updates = rows_of_updates(
            len(lengths.totals), self.plan.update_per_rank, self.config.rollouts.ppo_epochs, seed
        )[current.updates.done :]
        rows = np.concatenate(updates) if updates else np.zeros(0, dtype=np.int64)
        return TrainedTexts(lengths.totals[rows], int(lengths.responses[rows].sum()))

    @property
    def kl_of_loss(self) -> float:
        """The coefficient of the KL as a term of the policy's loss."""
        return self.kl.value if self.config.loss.kl_in == "loss" else 0.0

    @property
    def credit_is_fused(self) -> bool:
        """Whether the update's own forward passes give log-probs and values; see `FusedCredit`."""
        return self.config.credit_is_fused(self.plan)

    def complete(self, scored: ScoredRollout, drawn: Generation, models: PPOModels | None = None) -> Trajectory:
        """Log-probs and values, of the run's models unless others are given. In float32, the drawing pass has given
        the log-probs already; else it rounds more.
        """
        logprobs = drawn.logprobs if next(self.models.actor.module.parameters()).dtype == torch.float32 else None
        return (models or self.models).complete(scored, self.config.sampling.temperature, self.scoring, logprobs)

    def credit(
        self, trajectory: Trajectory, macro: MacroActions, samples: int = 1, moments: ScoreMoments | None = None
    ) -> PPOBatch:
        """Advantages and, of a critic, returns, where so many rows in succession are samples of a prompt."""
        moments = moments or self.moments
        return assign_credit(trajectory, macro, self.kl.value, self.config, samples, moments, self.estimator)

    def evaluate(self) -> tuple[Metrics, list[Sample]]:
        """Means over the held-out prompts, the same draws every time; {} without such prompts."""
        if not self.held_out:
            return {}, []
        metrics, samples = evaluate_responses(
            self.held_out,
            self.tokenizer,
            sample=lambda examples: self.sample(examples, SeedKind.EVALUATION, draw=0),
            judge=self.judged,
        )
        if self.config.rollouts.print_answers and is_main():
            show_samples(samples)
        return metrics, samples

    def judged(self, drawn: Generation, texts: ResponseTexts) -> tuple[PPOBatch, Outside]:
        """Responses of an evaluation with advantages; what else was measured."""
        trajectory, macro, outside = self.judge(drawn, texts)
        assert isinstance(trajectory, Trajectory)  # credit is not fused
        return self.credit(trajectory, macro), outside

    def self_check(self) -> None:
        """A few forward passes on two prompts. Raises UserError where a model is computed wrongly, or sampling is not
        what was asked for.
        """
        drawn, texts = self.sample(self.prompts[:2], SeedKind.SELF_CHECK, draw=0)
        trajectory = self.judged(drawn, texts)[0].trajectory
        check_rollout(self.models.actor, trajectory, self.sample.sampling, drawn.logprobs)
        tokens = (drawn.rollout.input_ids, drawn.rollout.attention_mask)
        for model in (self.models.critic, self.models.reward.model):
            if model is not None:
                check_scalar(model, tokens, self.sample.sampling.pad_id)

    def rehearse(self) -> None:
        """A micro-batch of the longest prompt of the data with responses of --max_answer_seq_len tokens."""
        longest = max(range(len(self.prompts)), key=self.lengths.__getitem__)
        prompt, response = self.lengths[longest], self.config.sampling.max_answer_seq_len
        rows = rows_of(pass_size(self.plan), prompt + response)
        rollout = filled_rollout(self.prompts[longest].prompt_ids, rows, prompt, response)
        batch = self.unrewarded(rollout)
        source = batch if isinstance(batch, PPOBatch) else FusedCredit(batch, self.credit)
        config, plan = self.config.changed(ppo_epochs=1), replace(self.plan, update_per_rank=rows)
        models, flag = self.models, "per_device_training_batch_size"
        total = prompt + response
        if (
            self.config.advantages.needs.segment_values
        ):  # completions of prompts and all but the last token of a response
            total += response - 1
        responses = self.plan.rollout_per_rank * self.plan.samples_per_prompt
        memory = decoding_bytes(models.rollouts, models.actor, responses, total)
        with rehearsal(models.trained, rows, prompt + response, flag, memory):
            ppo_update(models.actor, models.critic, source, config, plan, seed=0, kl_coef=self.kl_of_loss)

    def unrewarded(self, rollout: Rollout) -> PPOBatch | PendingBatch:
        """A rollout of one macro action in each row, where every log-prob, value and score is 0."""
        zeros = torch.zeros_like(rollout.response_mask, dtype=torch.float32)
        macro = segment(torch.zeros_like(rollout.response_mask), rollout.response_mask)
        scored = ScoredRollout(rollout, zeros, zeros[:, 0])
        if self.credit_is_fused:
            return PendingBatch(scored, macro)
        values = None if self.models.critic is None else zeros
        return PPOBatch(scored.with_numbers(zeros, values), macro, zeros, zeros, zeros, values)

    def why_stop(self, metrics: Metrics, update: int, may_stop: bool) -> str | None:
        return self.alarms.check(metrics, update, may_stop)

    def state_dict(self) -> Progress:
        numbers: Json = {"kl": self.kl.value, "alarms": self.alarms.state_dict()}
        ahead, tensors = ({}, {}) if self.ahead is None else self.ahead.state()
        if self.segment_values is not None:
            ahead, tensors = self.segment_values.state()
        state = state_with(numbers | {"scores": self.moments and asdict(self.moments)} | ahead, self.current)
        return replace(state, tensors=state.tensors | tensors)

    def load_state_dict(self, state: Progress) -> None:
        numbers = state.numbers
        self.kl = replace(self.kl, value=numbers["kl"])
        self.alarms.load_state_dict(numbers["alarms"])
        self.moments = self.moments and ScoreMoments(**numbers["scores"])
        if self.ahead is not None:
            self.ahead.load(state)
        if self.segment_values is not None:
            self.segment_values.load(state)
        if "current" in numbers:
            is_pending = any(name.startswith("batch.scored.") for name in state.tensors)
            self.current = Iteration.from_state(state, PendingBatch if is_pending else PPOBatch)
