# SPDX-License-Identifier: Apache-2.0
"""Scoring a rollout: scores, log-probs, values, and where its macro actions end.

`RolloutScorer.score_rollout` turns sampled responses into a `ScoredBatch`: the rows that an update trains on
(`ScoredRows`), and the numbers that are logged about them (`ExternalStats`). Scores come from a score source
(scoring/source.py), macro actions from a termination condition (rollouts/termination.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.data.encoding import decode_response
from dschat.models.layout import PassSize
from dschat.rollouts.engine import Generation
from dschat.rollouts.termination import Ends, TerminationCondition
from dschat.scoring.source import UNSCORED, Measured, ResponseTexts, Scores, scores_of
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.models import PPOModels, response_logprobs, response_values
from macro_actions.conditions import at_most
from macro_actions.segments import on_last_tokens, segment
from macro_actions.types import MacroActions, Rollout, ScoredRollout, Trajectory, without_responses

if TYPE_CHECKING:
    from dschat.scoring.segments import Segments
    from macro_actions.token_text import TokenReader

# Further numbers of each response by name, (B,) each: parts of the score, and the metric function's results.
AuxiliaryScores = Mapping[str, Tensor]


@dataclass(frozen=True)
class ExternalStats:
    """Numbers about a rollout of B rows that score sources and the parser report, with the same names on every rank.

    Attributes:
        auxiliary: shape ``(B,)`` each; their means are logged as objective/<name>.
        score_parts: those of them that are parts of the score. A response without a score has none of them: its number
            is the mean of the others.
        totals: sums over this rank's rows; the sums over all ranks are metrics.
        measured: (total, count) over this rank's rows; the means over all ranks are metrics.
    """

    auxiliary: AuxiliaryScores
    totals: Mapping[str, float]
    measured: Measured
    score_parts: frozenset[str] = frozenset()

    def with_sums_of(self, other: ExternalStats) -> ExternalStats:
        """Copy whose sums include those of other rows."""
        totals = {}
        for name, total in self.totals.items():
            totals[name] = total + other.totals[name]
        measured = {}
        for name, (total, count) in self.measured.items():
            other_total, other_count = other.measured[name]
            measured[name] = (total + other_total, count + other_count)
        return replace(self, totals=totals, measured=measured)


@dataclass(frozen=True)
class ScoredRows:
    """Scored responses, cut into macro actions: what an update trains on.

    Attributes:
        scored: rollout, scores and the reference's log-probs of B responses.
        macro: their macro actions.
        logprobs: shape ``(B, R)``, the actor's log-probs; None if the update's own forward passes compute them.
        values: shape ``(B, R)``, values of the states before each token; None without a critic or measured values.
    """

    scored: ScoredRollout
    macro: MacroActions
    logprobs: Tensor | None = None
    values: Tensor | None = None

    @property
    def rollout(self) -> Rollout:
        """The sampled responses."""
        return self.scored.rollout

    @property
    def response_mask(self) -> Tensor:
        """Shape (B, R), bool: response tokens."""
        return self.scored.response_mask

    @property
    def trajectory(self) -> Trajectory:
        """Scores, log-probs and values; only where the actor's log-probs are known."""
        assert self.logprobs is not None
        return self.scored.with_numbers(self.logprobs, self.values)


@dataclass(frozen=True)
class ScoredBatch:
    """A scored rollout on this rank, and what is logged about it.

    Attributes:
        rows: B scored responses; the responses of one prompt follow each other.
        bad_rows: shape ``(B,)``, bool: sampled from logits that are not finite.
        stats: numbers that score sources and the parser report.
        prompt_numbers: shape ``(B,)``, int64: positions of the prompts in the training data; None in evaluations.
        is_stale: whether the responses were sampled with the weights of the iteration before.
    """

    rows: ScoredRows
    bad_rows: Tensor
    stats: ExternalStats
    prompt_numbers: Tensor | None = None
    is_stale: bool = False


class RolloutScorer:
    """Scores rollouts with the models of a run, and cuts their responses into macro actions."""

    def __init__(
        self,
        models: PPOModels,
        condition: TerminationCondition,
        tokenizer: PreTrainedTokenizerBase,
        config: PPOConfig,
        size: PassSize,
    ) -> None:
        """Prepares scoring; `size` is the maximum size of a forward pass without gradients."""
        self.models = models
        self.condition = condition
        self._tokenizer = tokenizer
        self._config = config
        self._temperature = config.sampling.temperature
        self._size = size

    def score_rollout(
        self, generation: Generation, texts: ResponseTexts, epoch: int = 0, fuses_credit: bool = False
    ) -> ScoredBatch:
        """Scores responses and cuts them into macro actions. Every rank must call it.

        Without a source of scores, the score of a response is the sum of its teacher's log-ratios, so that metrics,
        samples and the choice of the best checkpoint have one.

        With --segment_rewards the macro actions come first, because score sources give a reward to each; the
        termination condition then reads neither scores nor values.

        Args:
            generation: B sampled responses.
            texts: what they say.
            epoch: pass over the training prompts, for conditions that are random.
            fuses_credit: do not compute the actor's log-probs and the critic's values.
        """
        rollout = generation.rollout
        ends: Ends | None = None
        macro: MacroActions | None = None
        ref_logprobs: Tensor | None = None

        # Macro actions first, if score sources reward them one by one.
        if self._config.rewards.segment_rewards is not None:
            ref_logprobs = response_logprobs(self.models.reference, rollout, self._temperature, self._size)
            ends = self._ends_without_scores(generation, ref_logprobs, epoch)
            macro = segment(ends.ends, rollout.response_mask)
            texts = replace(texts, segments=self._segments_of(rollout, texts, macro))

        # Scores, and log-probs of the reference and the teacher.
        scores = scores_of(self.models.reward(rollout, texts))
        auxiliary = dict(scores.parts)
        if self.models.metric is not None:
            metric_scores = self.models.metric(rollout, replace(texts, segments=None))
            auxiliary[self.models.metric_name] = scores_of(metric_scores).values
        scored = self._scored_rollout(rollout, scores, ref_logprobs, macro)

        # The actor's log-probs and the critic's values.
        logprobs: Tensor | None = None
        values: Tensor | None = None
        if not fuses_credit:
            logprobs = self.actor_logprobs(scored.rollout, generation)
            if generation.logprobs is not None and logprobs is not generation.logprobs:
                rollout = replace(scored.rollout, drawn_logprobs=generation.logprobs)
                scored = replace(scored, rollout=rollout)
            values = self.critic_values(scored.rollout)
            if not self._config.advantages.needs.scores:
                scored = replace(scored, scores=scored.with_numbers(logprobs, values).teacher_log_ratios.sum(1))

        # Macro actions, unless they came first.
        if ends is None:
            ends = self.find_ends(scored, logprobs, values, epoch)
        rows = ScoredRows(scored, segment(ends.ends, scored.response_mask), logprobs, values)
        score_parts = frozenset(scores.parts) - {UNSCORED}
        stats = ExternalStats(auxiliary, ends.totals, scores.measured, score_parts)
        return ScoredBatch(rows, generation.bad_rows, stats)

    def actor_logprobs(self, rollout: Rollout, generation: Generation) -> Tensor:
        """Log-probs of the actor, (B, R).

        An actor in float32 has computed them while it sampled; sampling in a shorter format rounds differently from a
        forward pass, so that they are computed anew.
        """
        is_float32 = next(self.models.actor.module.parameters()).dtype == torch.float32
        if is_float32 and generation.logprobs is not None:
            return generation.logprobs
        self.models.actor.eval()
        return response_logprobs(self.models.actor, rollout, self._temperature, self._size)

    def critic_values(self, rollout: Rollout) -> Tensor | None:
        """Values of the states before each response token, (B, R); None without a critic."""
        if self.models.critic is None:
            return None
        self.models.critic.eval()
        return response_values(self.models.critic, rollout, self._size)

    def find_ends(self, scored: ScoredRollout, logprobs: Tensor | None, values: Tensor | None, epoch: int) -> Ends:
        """Where macro actions end; with --advantage_estimator segment_mc at most --mc_max_segments in a response."""
        ends = self.condition(scored if logprobs is None else scored.with_numbers(logprobs, values), epoch)
        if not self._config.advantages.needs.segment_values:
            return ends
        limited = at_most(ends.ends, scored.response_mask, self._config.advantages.mc_max_segments)
        return replace(ends, ends=limited)

    def _ends_without_scores(self, generation: Generation, ref_logprobs: Tensor, epoch: int) -> Ends:
        """Ends of macro actions before there are scores; the termination condition reads zeros instead of scores."""
        scored = ScoredRollout(generation.rollout, ref_logprobs, ref_logprobs.new_zeros(len(ref_logprobs)))
        logprobs: Tensor | None = None
        if self._config.termination.reads_policy:
            logprobs = self.actor_logprobs(generation.rollout, generation)
        return self.find_ends(scored, logprobs, None, epoch)

    @cached_property
    def _reader(self) -> TokenReader:
        from macro_actions.token_text import TokenReader

        return TokenReader(self._tokenizer)

    def _segments_of(self, rollout: Rollout, texts: ResponseTexts, macro: MacroActions) -> Segments:
        """Texts and lengths of the macro actions of each response, for the score sources."""
        from dschat.scoring.segments import Segments
        from macro_actions.token_text import texts_of_macro_actions

        decode = partial(decode_response, self._tokenizer)
        segment_texts = []
        segment_lengths = []
        for response, ids, row_lengths in zip(
            texts.responses, rollout.response_rows(), macro.lengths.tolist(), strict=True
        ):
            lengths = [length for length in row_lengths if length]
            segment_texts.append(texts_of_macro_actions(self._reader, decode, response, ids, lengths))
            segment_lengths.append(lengths)
        by_prefix = self._config.rewards.segment_rewards == "prefix"
        return Segments(segment_texts, segment_lengths, by_prefix)

    def _scored_rollout(
        self, rollout: Rollout, scores: Scores, ref_logprobs: Tensor | None, macro: MacroActions | None
    ) -> ScoredRollout:
        """Rollout with its scores, the reference's log-probs, which may be known, and the teacher's.

        A response that could not be scored loses its tokens: its row has nothing to train on.
        """
        if scores.missing is not None:
            rollout = without_responses(rollout, scores.missing)
        if ref_logprobs is None:
            ref_logprobs = response_logprobs(self.models.reference, rollout, self._temperature, self._size)
        ref_logprobs = torch.where(rollout.response_mask, ref_logprobs, 0.0)
        teacher_logprobs: Tensor | None = None
        if self.models.teacher is not None:
            teacher_logprobs = response_logprobs(self.models.teacher, rollout, self._temperature, self._size)
        segment_rewards = None
        if macro is not None and scores.segments is not None:
            segment_rewards = on_last_tokens(scores.segments, macro)
        if scores.tokens is not None:
            segment_rewards = scores.tokens
        return ScoredRollout(rollout, ref_logprobs, scores.values.float(), segment_rewards, teacher_logprobs)
