# SPDX-License-Identifier: Apache-2.0
"""The objects of one PPO iteration: their properties, some of their rows, and less padding."""

from dataclasses import fields, replace

import pytest
import torch

from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import MacroActions, PPOBatch, Rollout, ScoredRollout, Trajectory, select_rows, trim
from rl_cases import credit_of, tensors_of, trajectory_of


def batch_of(lengths: list[int], width: int, prompt_width: int = 3) -> PPOBatch:
    """A PPO batch whose input ids are all different."""
    trajectory = trajectory_of(lengths, width, 0, prompt_width=prompt_width)
    ids = torch.arange(trajectory.rollout.input_ids.numel()).view_as(trajectory.rollout.input_ids)
    trajectory = replace(trajectory, rollout=replace(trajectory.rollout, input_ids=ids))
    return credit_of(trajectory, fixed_ngram_ends(trajectory.response_mask, 2), kl_coef=0.05, gamma=1.0, lam=0.95)


def drawn_by_another(batch: PPOBatch) -> PPOBatch:
    """The same, by an engine with log-probs of its own."""
    rollout = replace(batch.rollout, drawn_logprobs=batch.trajectory.logprobs - 1)
    return replace(batch, trajectory=replace(batch.trajectory, rollout=rollout))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Rollout, "input_ids attention_mask response_mask prompt_index finished drawn_logprobs sample_index"),
        (ScoredRollout, "rollout ref_logprobs scores"),
        (Trajectory, "rollout logprobs ref_logprobs values scores"),
        (MacroActions, "index lengths mask"),
        (PPOBatch, "trajectory macro kl rewards advantages returns"),
    ],
)
def test_fields(kind, names) -> None:
    assert [f.name for f in fields(kind)] == names.split()


def test_the_response_of_a_rollout() -> None:
    batch = batch_of([2, 1], 2)
    assert batch.trajectory.rollout.response_ids.tolist() == [[3, 4], [8, 9]]
    assert batch.response_mask.tolist() == [[True, True], [True, False]]
    assert batch.response_mask is batch.trajectory.response_mask is batch.trajectory.rollout.response_mask


@pytest.mark.parametrize("drawn", [False, True])
def test_select_rows_selects_in_every_tensor(drawn) -> None:
    batch = batch_of([4, 0, 3], 5)
    if drawn:
        batch = drawn_by_another(batch)
    order = [2, 0, 2]
    found = select_rows(batch, torch.tensor(order))
    assert type(found) is PPOBatch
    for mine, other in zip(tensors_of(batch), tensors_of(found), strict=True):
        assert torch.equal(other, mine[order])


def test_trim_drops_padding_behind_the_responses() -> None:
    """Responses of 6 columns keep their first 4; the prompts' 5 columns and the numbers stay."""
    batch = drawn_by_another(batch_of([4, 0, 3], 6, prompt_width=5))
    before = [t.clone() for t in tensors_of(batch)]
    small = trim(batch, 4)
    rollout = small.trajectory.rollout
    assert rollout.input_ids.tolist() == [[11 * i + k for k in range(9)] for i in range(3)]
    assert torch.equal(rollout.attention_mask, batch.trajectory.rollout.attention_mask[:, :9])
    assert rollout.response_ids.shape == small.response_mask.shape == (3, 4)
    for name in ("kl", "rewards", "advantages", "returns"):
        assert torch.equal(getattr(small, name), getattr(batch, name)[:, :4])
    assert torch.equal(small.rollout.drawn_logprobs, batch.rollout.drawn_logprobs[:, :4])
    for name in ("logprobs", "ref_logprobs", "values"):
        assert torch.equal(getattr(small.trajectory, name), getattr(batch.trajectory, name)[:, :4])
    assert torch.equal(small.macro.index, batch.macro.index[:, :4])
    assert torch.equal(small.macro.lengths, batch.macro.lengths)
    for tensor, copy in zip(tensors_of(batch), before, strict=True):
        assert torch.equal(tensor, copy)


def test_trim_to_the_same_size_changes_nothing() -> None:
    batch = batch_of([4, 0, 3], 6)
    for mine, other in zip(tensors_of(batch), tensors_of(trim(batch, 6)), strict=True):
        assert torch.equal(mine, other)
