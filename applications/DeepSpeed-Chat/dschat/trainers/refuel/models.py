# SPDX-License-Identifier: Apache-2.0
"""The models of an online REFUEL run, and the log-probs of whole replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat.models.engines import PolicyEngine, PolicyForward, TrainedPolicy
from dschat.models.layout import Layout, Lengths, group_by_length, lay_out
from dschat.rl.types import Rollout
from dschat.rollouts.engine import RolloutEngine
from dschat.run.stop import raise_if_stopped
from dschat.scoring.source import DialogueScores


@dataclass(frozen=True)
class RefuelModels:
    """Engines and the source of scores of a run, and what draws from the policy."""

    policy: TrainedPolicy
    reference: PolicyEngine | None  # None where no reward depends on it
    reward: DialogueScores
    rollouts: RolloutEngine


def pair_layouts(rollout: Rollout, most: int) -> list[Layout]:
    """All pairs for ⌈N / most⌉ forward passes, those of similar length together.

    The passes follow from the lengths alone, so that a policy that has not changed gives the same numbers again.

    Args:
        rollout: 2N rows; row n and row N + n are a pair.
        most: pairs of the longest length that a forward pass may hold.

    Returns:
        Layouts of 2n rows; the first n are first replies, the others their partners in the same order.
    """
    lengths = Lengths.of(rollout)
    count = len(lengths.totals) // 2
    longer = np.maximum(lengths.totals[:count], lengths.totals[count:])
    groups = group_by_length(longer, most)
    return [lay_out(rollout, np.concatenate([pairs, pairs + count]), lengths) for pairs in groups]


def summed_logprobs(model: PolicyForward, rows: Layout, temperature: float) -> Tensor:
    """Σ log π(y_j | s, y_<j) over each reply's tokens, (b,) float32, differentiable."""
    logprobs, _ = model(rows.input_ids, None, rows.targets, temperature, False)
    return rows.spread(logprobs).sum(1)


@torch.no_grad()
def reply_logprobs(model: PolicyForward, layouts: Sequence[Layout], temperature: float) -> Tensor:
    """The same for all B rows of some layouts, by row number; without gradient.

    Args:
        model: PolicyModel or its engine.
        layouts: every row is in one of them.
        temperature: that of sampling.
    """
    result = torch.zeros(sum(len(rows.rows) for rows in layouts), device=layouts[0].rows.device)
    for rows in layouts:
        raise_if_stopped()
        result[rows.rows] = summed_logprobs(model, rows, temperature)
    return result
