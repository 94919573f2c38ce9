# SPDX-License-Identifier: Apache-2.0
"""Values of the states before macro actions, measured by sampling and scoring completions (segment_mc)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat.data.encoding import decode_sampled
from dschat.data.examples import PromptExample
from dschat.rollouts.engine import Generation
from dschat.rollouts.sampling import row_seed
from dschat.run.distributed import largest_over_ranks
from dschat.run.state import SeedKind
from dschat.scoring.source import Measured, ResponseTexts, ScoreSource, scores_of
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.collect import ActorSampler, Collector, RolloutWork
from dschat.training.ppo.credit import trained_scores, with_scores
from dschat.training.ppo.score import ScoredBatch, ScoredRows
from macro_actions.rewards import ScoreMoments
from macro_actions.segments import to_tokens
from macro_actions.types import MacroActions, Rollout, select_rows


@dataclass(frozen=True)
class SegmentState:
    """A response up to one of its macro actions."""

    row: int
    macro_action: int
    start: int  # response tokens before the macro action


@dataclass(frozen=True)
class SegmentValues:
    """Measured values of the states before the macro actions of B responses.

    Attributes:
        values: shape ``(B, M)``, float32, 0 where there is no macro action.
        tokens: tokens that were sampled on this rank.
        unscored: completions on this rank that have no score.
        measured: what score sources report of the completions, part by part.
    """

    values: Tensor
    tokens: int
    unscored: int
    measured: list[Measured]


class SegmentValueCollector(Collector):
    """Adds the values of the states before macro actions to a rollout.

    V̂(s) is the mean score of K completions from s (Kazemnejad et al. 2024, "VinePPO"), see `mean_scores`.

    Values are measured part by part, so that not all completions are in memory at once. A run that is stopped samples
    the rollout and its completions again.
    """

    def __init__(
        self,
        inner: Collector,
        actor: ActorSampler,
        reward: ScoreSource,
        prompts: Sequence[PromptExample],
        config: PPOConfig,
        part_rows: int,
    ) -> None:
        """Connects the stage to the one before it; `part_rows` responses are measured together."""
        self._inner = inner
        self._actor = actor
        self._reward = reward
        self._prompts = prompts
        self._config = config
        self._completions = config.advantages.mc_samples
        self._part_rows = part_rows

    def collect(self, work: RolloutWork) -> ScoredBatch:
        batch = self._inner.collect(work)
        work.clock.record("scoring")
        rows = batch.rows
        stats = batch.stats
        assert batch.prompt_numbers is not None  # batches of training have them
        examples = [self._prompts[number] for number in batch.prompt_numbers.tolist()]
        moments = work.moments
        if moments is not None:
            moments = with_scores(moments, rows.scored)
        segment_values = self.measure(rows, examples, work.iteration, moments)
        work.clock.record("completions")

        rows = replace(rows, values=to_tokens(segment_values.values, rows.macro))
        stats = replace(
            stats,
            totals={
                **stats.totals,
                "rollout/mc_tokens": segment_values.tokens,
                "rollout/mc_unscored": segment_values.unscored,
            },
            measured=with_judge_of_completions(stats.measured, segment_values.measured),
        )
        return replace(batch, rows=rows, stats=stats)

    def measure(
        self, rows: ScoredRows, examples: Sequence[PromptExample], iteration: int, moments: ScoreMoments | None
    ) -> SegmentValues:
        """Values of the states before macro actions. Every rank must call it, with an equal number of rows.

        Args:
            rows: B responses with M macro actions at most.
            examples: the prompt of each row.
            iteration: number of the iteration, which seeds the completions.
            moments: moments of the scores so far, with --normalize_scores.

        Raises:
            Stopped: soon after a signal.
            UserError: a score source failed.
        """
        rollout = rows.rollout
        macro = rows.macro
        response_ids = rollout.response_rows()
        count = len(response_ids)
        columns = macro.mask.shape[1]
        all_values = []
        tokens = 0
        unscored = 0
        reports = []
        for first in range(0, count, self._part_rows):
            part = range(first, min(first + self._part_rows, count))
            states = _states_of(macro, part)
            generation, texts = self._sample_completions(
                rollout, response_ids, states, examples, iteration, same_weights=first > 0
            )
            scores, missing, measured = self._score_completions(generation, texts, states, moments)
            means = mean_scores(scores, missing)

            # A response without tokens has one state but no macro action: the value of that state is dropped.
            values = means.new_zeros(len(part), max(columns, 1))
            rows_of_part = [state.row - first for state in states]
            macro_actions = [state.macro_action for state in states]
            values[rows_of_part, macro_actions] = means
            all_values.append(values[:, :columns])
            tokens += int(generation.rollout.response_mask.sum())
            unscored += int(missing.sum())
            reports.append(measured)
        values = torch.where(macro.mask, torch.cat(all_values), 0.0)
        return SegmentValues(values=values, tokens=tokens, unscored=unscored, measured=reports)

    def _sample_completions(
        self,
        rollout: Rollout,
        response_ids: Sequence[Sequence[int]],
        states: Sequence[SegmentState],
        examples: Sequence[PromptExample],
        iteration: int,
        same_weights: bool,
    ) -> tuple[Generation, ResponseTexts]:
        """K completions of each state, S · K rows, and the texts of the completed responses."""
        actor = self._actor
        assert rollout.sample_index is not None  # sampled rollouts have it
        sample_numbers = rollout.sample_index.tolist()
        max_new_tokens = actor.sampling.max_new_tokens

        row_examples = []
        prefixes = []
        prompts = []
        seeds = []
        limits = []
        for state in states:
            example = examples[state.row]
            prefix = list(response_ids[state.row][: state.start])
            seed_parts = (iteration, example.index, sample_numbers[state.row], state.macro_action)
            for number in range(self._completions):
                row_examples.append(example)
                prefixes.append(prefix)
                prompts.append([*example.prompt_ids, *prefix])
                seeds.append(row_seed(actor.seed, SeedKind.COMPLETION, *seed_parts, number))
                limits.append(max_new_tokens - state.start)

        with actor.session(same_weights) as sample_responses:
            generation = sample_responses(prompts, actor.sampling, seeds, limits=limits)
        numbers = [example.index for example in row_examples]
        prompt_index = torch.tensor(numbers, device=generation.bad_rows.device)
        completions = replace(generation.rollout, prompt_index=prompt_index)
        texts = self._completed_texts(row_examples, prefixes, completions)
        return replace(generation, rollout=completions), texts

    def _completed_texts(
        self, examples: Sequence[PromptExample], prefixes: Sequence[list[int]], completions: Rollout
    ) -> ResponseTexts:
        """Texts of the completed responses: the ids before each completion, followed by the completion."""
        prompt_texts = []
        responses = []
        rows = []
        finished = completions.finished.tolist()
        for example, prefix, completion, has_end in zip(
            examples, prefixes, completions.response_rows(), finished, strict=True
        ):
            prompt_texts.append(example.prompt_text)
            responses.append(decode_sampled(self._actor.tokenizer, [*prefix, *completion], has_end))
            rows.append(example.row)
        return ResponseTexts(prompt_texts, responses, rows, finished)

    def _score_completions(
        self,
        generation: Generation,
        texts: ResponseTexts,
        states: Sequence[SegmentState],
        moments: ScoreMoments | None,
    ) -> tuple[Tensor, Tensor, Measured]:
        """Scores of completions (S, K) as they are trained on; which are missing (S, K) bool; what sources report."""
        rollout = generation.rollout
        count = len(rollout.response_mask)
        starts = torch.tensor([state.start for state in states], device=rollout.response_mask.device)
        lengths = rollout.response_mask.sum(1) + starts.repeat_interleave(self._completions)

        # Ranks with fewer completions repeat their first, so that all score as many.
        padding = largest_over_ranks(count) - count
        padded_rows = torch.tensor([*range(count), *[0] * padding], device=lengths.device)
        padded = select_rows(rollout, padded_rows)
        raw_scores = scores_of(self._reward(padded, texts.repeated(padding)))
        padded_scores = trained_scores(
            raw_scores.values.float(), padded.finished, lengths[padded_rows], self._config, moments
        )
        scores = padded_scores[:count]

        missing = torch.zeros_like(generation.bad_rows)
        if raw_scores.missing is not None:
            missing = raw_scores.missing[:count] & ~generation.bad_rows
        # Completions sampled from logits that are not finite: NaN stops the run or leaves the rollout out, as
        # --on_nonfinite says.
        scores = torch.where(generation.bad_rows, torch.nan, scores)
        shape = (len(states), self._completions)
        return scores.view(shape), missing.view(shape), raw_scores.measured


def mean_scores(scores: Tensor, missing: Tensor) -> Tensor:
    """Mean score of each state's completions that have a score.

    A state without any gets the mean over all of its completions. Sources give missing scores the mean of the others,
    or NaN if there are none, which the trainer handles.

    Example: scores 1 5 5 of which the second is missing give 3; scores 5 5 5 that are all missing give 5.

    Args:
        scores: shape ``(S, K)``.
        missing: shape ``(S, K)``, bool.

    Returns:
        Shape ``(S,)``.
    """
    is_counted = ~missing | missing.all(1, keepdim=True)
    sums = torch.where(is_counted, scores, 0.0).sum(1)
    return sums / is_counted.sum(1)


def with_judge_of_completions(measured: Measured, measured_parts: Sequence[Measured]) -> Measured:
    """What sources report of a rollout, with the judge's questions about completions.

    The cost of completions is added to that of the responses from whose states they begin.
    """
    sums = dict(measured)
    for part in measured_parts:
        if "judge/cached" in part:
            cached, asked = sums["judge/cached"]
            part_cached, part_asked = part["judge/cached"]
            sums["judge/cached"] = (cached + part_cached, asked + part_asked)
        if "judge/cost" in part:
            cost, responses = sums["judge/cost"]
            part_cost, _ = part["judge/cost"]
            sums["judge/cost"] = (cost + part_cost, responses)
    return sums


def _states_of(macro: MacroActions, rows: Sequence[int]) -> list[SegmentState]:
    """The states before the macro actions of some rows.

    A response without tokens, because it could not be scored, has one state: no rank is without completions.
    """
    starts = (macro.lengths.cumsum(1) - macro.lengths).tolist()
    counts = macro.mask.sum(1).tolist()
    states = []
    for row in rows:
        if not counts[row]:
            states.append(SegmentState(row, 0, 0))
        for number in range(counts[row]):
            states.append(SegmentState(row, number, starts[row][number]))
    return states
