# SPDX-License-Identifier: Apache-2.0
"""Termination conditions that the product does not have; the first two fit its hook for users' functions."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dschat.models.engines import PolicyEngine
from dschat.rl.masked import last_true
from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import ScoredRollout, Trajectory
from trials.estimators import values_of

MEAN_LENGTH = 5  # tokens of a macro action
LONGEST = 10
ENOUGH = 0.4  # explained variance at mid-response with which macro actions are tokens


def value_changes(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Cuts where the critic's value changes most: behind one token in `MEAN_LENGTH`."""
    values, mask = values_of(trajectory), trajectory.response_mask
    change = torch.zeros_like(values)
    change[:, :-1] = (values[:, 1:] - values[:, :-1]).abs()
    before_last = mask & ~last_true(mask)
    return cut_at_highest(torch.where(before_last, change, -1.0), mask)


def shrinking(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Every n tokens, where n falls from `LONGEST` to 1 as the critic's explained variance grows to `ENOUGH`."""
    mask, rows = trajectory.response_mask, torch.arange(len(trajectory.scores))
    middle = values_of(trajectory)[rows, mask.sum(1) // 2]
    explained = 1 - (trajectory.scores - middle).var() / trajectory.scores.var()
    share = min(max(float(explained) / ENOUGH, 0.0), 1.0)
    return fixed_ngram_ends(mask, round(LONGEST - share * (LONGEST - 1)))


class HighEntropy:
    """Cuts before the tokens of which the reference was least sure: one in `MEAN_LENGTH`."""

    def __init__(self, reference: PolicyEngine) -> None:
        self._reference = reference

    def __call__(self, trajectory: Trajectory | ScoredRollout) -> Tensor:
        """Ends (B, R)."""
        rollout, mask = trajectory.rollout, trajectory.response_mask
        with torch.no_grad():
            _, entropy = self._reference(rollout.input_ids, rollout.attention_mask, mask.shape[1])
        before = torch.full_like(entropy, -1.0)
        before[:, :-1] = torch.where(mask[:, 1:], entropy[:, 1:], -1.0)
        return cut_at_highest(before, mask)


def cut_at_highest(x: Tensor, mask: Tensor) -> Tensor:
    """Ends (B, R) behind the tokens with the highest numbers, one in `MEAN_LENGTH` of each row, and at its end."""
    wanted = (mask.sum(1) / MEAN_LENGTH).ceil().long() - 1
    rank = x.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return ((rank < wanted[:, None]) & mask) | last_true(mask)
