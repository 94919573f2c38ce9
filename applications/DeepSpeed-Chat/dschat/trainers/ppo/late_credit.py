# SPDX-License-Identifier: Apache-2.0
"""One update per rollout: its own forward passes give the log-probs and values that credit assignment needs.

The policy that samples is the one that is updated, so a separate pass over the rollout would compute the same numbers
once more. Credit assignment works on any subset of rows, and so micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.models.layout import Layout
from dschat.rl.types import MacroActions, PPOBatch, Rollout, ScoredRollout, Trajectory, select_rows, trim

Credit = Callable[[Trajectory, MacroActions], PPOBatch]


@dataclass(frozen=True)
class PendingBatch:
    """A rollout and its macro actions, before actor and critic are asked."""

    scored: ScoredRollout
    macro: MacroActions

    @property
    def rollout(self) -> Rollout:
        """What was sampled."""
        return self.scored.rollout

    @property
    def response_mask(self) -> Tensor:
        """(B, R) bool, the rollout's."""
        return self.scored.response_mask


class LateCredit:
    """Collects what actor and critic say of a rollout while they are trained on it."""

    def __init__(self, pending: PendingBatch, credit: Credit) -> None:
        """Takes a batch of B rows, and what gives a trajectory's advantages and returns, row by row."""
        self.pending, self._credit = pending, credit
        self._logprobs, self._values = torch.zeros_like(pending.scored.ref_logprobs).repeat(2, 1, 1).unbind()

    def part(self, rows: Layout, logprobs: Tensor, values: Tensor) -> PPOBatch:
        """The micro-batch of some rows, from the models' numbers (b, R') of them; kept for `batch`."""
        logprobs, values = logprobs.detach(), values.detach()
        self._logprobs[rows.rows, : rows.width], self._values[rows.rows, : rows.width] = logprobs, values
        part = trim(select_rows(self.pending, rows.rows), rows.width)
        scored = part.scored
        return self._credit(
            Trajectory(scored.rollout, logprobs, scored.ref_logprobs, values, scored.scores), part.macro
        )

    def batch(self) -> PPOBatch:
        """All rows, after the update."""
        scored = self.pending.scored
        trajectory = Trajectory(self.pending.rollout, self._logprobs, scored.ref_logprobs, self._values, scored.scores)
        return self._credit(trajectory, self.pending.macro)
