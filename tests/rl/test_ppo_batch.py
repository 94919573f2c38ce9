# SPDX-License-Identifier: Apache-2.0
"""Credit assignment as a whole against the scalar rules, and the objects of an iteration."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import rl_references as ref
from closeness import FORMULA, assert_near
from macro_actions.conditions import fixed
from macro_actions.types import PPOBatch, Trajectory, join, select_rows, trim
from rl_cases import (
    PADDING,
    PROPERTY,
    SEEDS,
    SEGMENTS,
    VALUE_FUNCTIONS,
    credit_of,
    ends_of,
    tensors_of,
    trajectory_of,
    width_of,
)

PAPER = {"kl_coef": 0.05, "gamma": 1.0, "lam": 0.95}
PER_TOKEN = ("kl", "rewards", "advantages", "returns")
OPTIONS = {
    **{"kl_coef": [0.2], "gamma": [0.9, 1.0], "lam": [0.0, 0.95, 1.0], "value_function": VALUE_FUNCTIONS},
    **{"macro_reward": ["sum", "mean"], "kl_estimator": ["k1", "k2", "k3"], "clip_reward_value": [None, 0.5]},
}


def expected_rows(trajectory: Trajectory, segments: list[list[int]], **options) -> dict[str, list]:
    """The scalar reference of every row."""
    rows = [
        ref.ppo_row(
            trajectory.logprobs[i].tolist(),
            trajectory.ref_logprobs[i].tolist(),
            trajectory.values[i].tolist(),
            trajectory.scores[i].item(),
            row,
            **options,
        )
        for i, row in enumerate(segments)
    ]
    return {name: [row[name] for row in rows] for name in PER_TOKEN}


@PROPERTY
@given(
    segments=SEGMENTS,
    padding=PADDING,
    seed=SEEDS,
    options=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    trap=st.sampled_from([math.nan, math.inf, -math.inf, 0.0]),
)
@example(segments=[[], []], padding=2, seed=0, options={"kl_coef": 0.2, "gamma": 1.0, "lam": 0.95}, trap=math.nan)
def test_ppo_batch_is_the_scalar_rule(segments, padding, seed, options, trap) -> None:
    """Row by row, so that a row depends neither on the others nor on padding."""
    lengths = [sum(row) for row in segments]
    width = width_of(lengths, padding)
    trajectory = trajectory_of(lengths, width, seed, off_mask=trap)
    batch = credit_of(trajectory, ends_of(segments, width), **options)
    for name, expected in expected_rows(trajectory, segments, **options).items():
        found = getattr(batch, name)
        assert found.dtype == torch.float32 and not found.requires_grad
        assert_near(found[trajectory.response_mask], torch.tensor(expected)[trajectory.response_mask])
        assert torch.isfinite(found).all()
        if name != "returns":
            assert not found[~trajectory.response_mask].any()
    assert batch.macro.lengths[batch.macro.mask].tolist() == [n for row in segments for n in row]


def test_one_row_by_hand() -> None:
    """Actions of 2 and 1 tokens: values 2 and 4, rewards -0.1 and 0.9, deltas 1.9 and -3.1, gamma·lam 0.5."""
    trajectory = replace(
        trajectory_of([3], 4, 0),
        logprobs=torch.tensor([[-1.0, -2.0, -3.0, math.nan]]),
        ref_logprobs=torch.tensor([[-1.5, -2.5, -4.0, math.nan]]),
        values=torch.tensor([[1.0, 3.0, 4.0, math.nan]]),
        scores=torch.tensor([1.0]),
    )
    batch = credit_of(trajectory, ends_of([[2, 1]], 4), kl_coef=0.1, gamma=1.0, lam=0.5)
    assert_near(batch.kl, [[0.5, 0.5, 1.0, 0.0]], FORMULA)
    assert_near(batch.rewards, [[-0.05, -0.05, 0.9, 0.0]], FORMULA)
    assert_near(batch.advantages[:, :3], [[0.35, 0.35, -3.1]], FORMULA)
    assert_near(batch.returns[:, :3], [[2.35, 2.35, 0.9]], FORMULA)


# Options


# The objects


def test_nothing_is_modified_in_place() -> None:
    trajectory = trajectory_of([3, 0, 2], 4, 0)
    ends = fixed(trajectory.response_mask, 2)
    before = [t.clone() for t in (*tensors_of(trajectory), ends)]
    credit_of(trajectory, ends, **PAPER, clip_reward_value=0.1, missing_eos_penalty=1.0, macro_reward="mean")
    for tensor, copy in zip((*tensors_of(trajectory), ends), before, strict=True):
        assert torch.equal(tensor, copy)


def batch_of(lengths: list[int], width: int, prompt_width: int = 3) -> PPOBatch:
    """A PPO batch whose input ids are all different."""
    trajectory = trajectory_of(lengths, width, 0, prompt_width=prompt_width)
    ids = torch.arange(trajectory.rollout.input_ids.numel()).view_as(trajectory.rollout.input_ids)
    trajectory = replace(trajectory, rollout=replace(trajectory.rollout, input_ids=ids))
    return credit_of(trajectory, fixed(trajectory.response_mask, 2), kl_coef=0.05, gamma=1.0, lam=0.95)


def drawn_by_another(batch: PPOBatch) -> PPOBatch:
    """The same, by an engine with log-probs of its own."""
    rollout = replace(batch.rollout, drawn_logprobs=batch.trajectory.logprobs - 1)
    return replace(batch, trajectory=replace(batch.trajectory, rollout=rollout))


@pytest.mark.parametrize("swapped", [False, True])
def test_joined_rows_are_padded_by_hand(swapped) -> None:
    """Prompts of 2 and 3 columns, responses of 3 and 1, macro actions of at most 2 and 1."""
    one, other = (drawn_by_another(batch_of(*sizes)) for sizes in (([3, 2], 3, 2), ([1], 1, 3)))
    found = join([other, one] if swapped else [one, other], pad_id=99)
    if swapped:
        found = select_rows(found, torch.tensor([1, 2, 0]))
    rollout = found.trajectory.rollout
    assert rollout.input_ids.tolist() == [[99, 0, 1, 2, 3, 4], [99, 5, 6, 7, 8, 9], [0, 1, 2, 3, 99, 99]]
    assert rollout.attention_mask.int().tolist() == [[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert rollout.response_mask.int().tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert rollout.prompt_index.tolist() == [0, 1, 0]
    assert found.macro.index.tolist() == [[0, 0, 1], [0, 0, -1], [0, -1, -1]]
    assert found.macro.lengths.tolist() == [[2, 1], [2, 0], [1, 0]]
    assert found.macro.mask.int().tolist() == [[1, 1], [1, 0], [1, 0]]
    wide = torch.nn.functional.pad
    for name in PER_TOKEN:
        assert torch.equal(getattr(found, name), torch.cat([getattr(one, name), wide(getattr(other, name), (0, 2))]))
    assert torch.equal(rollout.drawn_logprobs[2:], wide(other.rollout.drawn_logprobs, (0, 2)))
    assert torch.equal(found.trajectory.scores, torch.cat([one.trajectory.scores, other.trajectory.scores]))
    assert found.counted is None


def test_trim_drops_padding_behind_the_responses() -> None:
    """Responses of 6 columns keep their first 4, as if they never had more; the prompts' 5 columns stay."""
    batch, narrow = (drawn_by_another(batch_of([4, 0, 3], width, prompt_width=5)) for width in (6, 4))
    before = [t.clone() for t in tensors_of(batch)]
    small = trim(batch, 4)
    assert small.rollout.input_ids.tolist() == [[11 * i + k for k in range(9)] for i in range(3)]
    for found, expected in zip(tensors_of(small), tensors_of(narrow), strict=True):
        assert found is small.rollout.input_ids or torch.equal(found, expected)
    for tensor, copy in zip(tensors_of(batch), before, strict=True):
        assert torch.equal(tensor, copy)
