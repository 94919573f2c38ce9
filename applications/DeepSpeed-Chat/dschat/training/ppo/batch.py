# SPDX-License-Identifier: Apache-2.0
"""A scored rollout on one rank: its rows, and the numbers that are logged about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat.scoring.source import Measured
from macro_actions.groups import are_equal
from macro_actions.types import MacroActions, Rollout, ScoredRollout, Trajectory, join, select_rows

# Further numbers of each response by name, (B,) each: parts of the score, and the metric function's results.
AuxiliaryScores = Mapping[str, Tensor]


@dataclass(frozen=True)
class ExternalStats:
    """Numbers about a rollout of B rows that score sources and the parser report, with the same names on every rank.

    Attributes:
        auxiliary: shape ``(B,)`` each; their means are logged as objective/<name>.
        totals: sums over this rank's rows; the sums over all ranks are metrics.
        measured: (total, count) over this rank's rows; the means over all ranks are metrics.
    """

    auxiliary: AuxiliaryScores
    totals: Mapping[str, float]
    measured: Measured

    def with_sums_of(self, other: ExternalStats) -> ExternalStats:
        """Copy whose sums include those of other rows."""
        totals = {name: total + other.totals[name] for name, total in self.totals.items()}
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


def select_prompts(
    batch: ScoredBatch,
    prompts: Sequence[int],
    samples: int,
) -> ScoredBatch:
    """Rows of some prompts, given by their positions in the batch; `samples` rows belong to each."""
    first_rows = samples * torch.tensor(prompts, dtype=torch.long)
    rows = first_rows[:, None] + torch.arange(samples)
    return select_rows(batch, rows.flatten().to(batch.bad_rows.device))


def concat_rows(batches: Sequence[ScoredBatch], pad_id: int) -> ScoredBatch:
    """Rows of all batches, one batch after the other, with the totals of the first; `pad_id` fills ids."""
    first = batches[0]
    auxiliary = {}
    for name in first.stats.auxiliary:
        auxiliary[name] = torch.cat([batch.stats.auxiliary[name] for batch in batches])
    numbers = [batch.prompt_numbers for batch in batches if batch.prompt_numbers is not None]
    return replace(
        first,
        rows=join([batch.rows for batch in batches], pad_id),
        bad_rows=torch.cat([batch.bad_rows for batch in batches]),
        stats=replace(first.stats, auxiliary=auxiliary),
        prompt_numbers=torch.cat(numbers) if numbers else None,
    )


def without_totals(batch: ScoredBatch) -> ScoredBatch:
    """Copy without sums over the rollout; only numbers of rows remain."""
    return replace(batch, stats=ExternalStats(batch.stats.auxiliary, {}, {}))


def equal_groups(scores: Tensor, response_mask: Tensor, samples: int) -> Tensor:
    """Prompts whose responses all have the same score, (P,) bool.

    Args:
        scores: shape ``(B,)``, as the score source gave them; the `samples` responses of a prompt follow each other.
        response_mask: shape ``(B, R)``; a response without a token has no score and does not count.
        samples: responses to each prompt.
    """
    counted = response_mask.any(1)
    return are_equal(
        scores.unflatten(0, (-1, samples)),
        counted.unflatten(0, (-1, samples)),
    )


def prompts_with_equal_scores(batch: ScoredBatch, samples: int) -> Tensor:
    """Prompts whose responses all have the same score, (P,) bool.

    Prompts with logits that are not finite are not among them: they must stay in the batch to be reported.
    """
    has_bad_rows = batch.bad_rows.view(-1, samples).any(1)
    return equal_groups(batch.rows.scored.scores, batch.rows.response_mask, samples) & ~has_bad_rows
