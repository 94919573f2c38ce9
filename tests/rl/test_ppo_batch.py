# SPDX-License-Identifier: Apache-2.0
"""The whole core: trajectory and ends in, advantages and returns out."""

import math
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import rl_references as ref
from closeness import FORMULA, assert_near
from dschat.rl.macro_actions import pool_rewards
from dschat.rl.termination import (
    fixed_ngram_ends,
    isolate_last_token,
    make_row_seeds,
    perplexity_ends,
    randomized_ngram_ends,
)
from dschat.rl.types import PPOBatch, Trajectory, select_rows
from rl_cases import (
    PADDING,
    PPL_MODES,
    PROPERTY,
    ROW_LENGTHS,
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
CONDITIONS = ("fixed", "randomized", *PPL_MODES)


def cut(trajectory: Trajectory, condition: str) -> torch.Tensor:
    """ends (B,R) of one condition; `randomized` seeds rows from their prompt index."""
    mask = trajectory.response_mask
    if condition == "fixed":
        return fixed_ngram_ends(mask, 3)
    if condition == "randomized":
        seeds = make_row_seeds(7, trajectory.rollout.prompt_index, 1)
        return randomized_ngram_ends(mask, 1, (2, 3, 1), seeds)
    return perplexity_ends(trajectory.ref_logprobs, mask, condition)


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


# Against the scalar reference


@PROPERTY
@given(
    segments=SEGMENTS,
    padding=PADDING,
    seed=SEEDS,
    value_function=st.sampled_from(VALUE_FUNCTIONS),
    macro_reward=st.sampled_from(["sum", "mean"]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    clip=st.sampled_from([None, 0.5]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    gamma=st.sampled_from([0.9, 1.0]),
    trap=st.sampled_from([math.nan, math.inf, -math.inf, 0.0]),
)
def test_ppo_batch_is_the_scalar_rule(
    segments, padding, seed, value_function, macro_reward, kl_estimator, clip, lam, gamma, trap
) -> None:
    options = {
        "kl_coef": 0.2,
        "gamma": gamma,
        "lam": lam,
        "value_function": value_function,
        "macro_reward": macro_reward,
        "kl_estimator": kl_estimator,
        "clip_reward_value": clip,
    }
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
    base = trajectory_of([3], 4, 0)
    trajectory = Trajectory(
        rollout=base.rollout,
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


# Identities


@pytest.mark.parametrize("ngram", [14, 100, math.inf])
def test_a_whole_response_as_one_action(ngram) -> None:
    """One action per row: the advantage is the summed reward minus the mean value, whatever gamma and lam are."""
    trajectory = trajectory_of([14, 5, 0, 1], 14, 3)
    mask = trajectory.response_mask
    batch = credit_of(trajectory, fixed_ngram_ends(mask, ngram), kl_coef=0.05, gamma=0.3, lam=0.2)
    assert batch.macro.mask.sum(dim=1).tolist() == [1, 1, 0, 1]
    for i, length in enumerate((14, 5, 0, 1)):
        if length:
            total = trajectory.scores[i].item() - 0.05 * sum(
                (trajectory.logprobs[i, :length].double() - trajectory.ref_logprobs[i, :length].double()).tolist()
            )
            value = sum(trajectory.values[i, :length].tolist()) / length
            assert_near(batch.advantages[i, :length], [total - value] * length, FORMULA)
            assert_near(batch.returns[i, :length], [total] * length, FORMULA)


@pytest.mark.parametrize("condition", CONDITIONS)
@PROPERTY
@given(lengths=ROW_LENGTHS, padding=PADDING, seed=SEEDS, kl_coef=st.sampled_from([0.0, 0.05, 1.0]))
def test_macro_rewards_sum_to_score_minus_kl(condition, lengths, padding, seed, kl_coef) -> None:
    trajectory = trajectory_of(lengths, width_of(lengths, padding), seed)
    batch = credit_of(trajectory, cut(trajectory, condition), kl_coef=kl_coef, gamma=1.0, lam=0.95)
    totals = (pool_rewards(batch.rewards, batch.macro) * batch.macro.mask).sum(dim=1)
    kl = (trajectory.logprobs.double() - trajectory.ref_logprobs.double()).masked_fill(~trajectory.response_mask, 0.0)
    expected = torch.where(torch.tensor(lengths) > 0, trajectory.scores.double() - kl_coef * kl.sum(dim=1), 0.0)
    assert_near(totals, expected, FORMULA)
    assert batch.macro.lengths[batch.macro.mask].ge(1).all()
    assert (batch.macro.lengths * batch.macro.mask).sum(dim=1).tolist() == lengths


@pytest.mark.parametrize("condition", CONDITIONS)
@PROPERTY
@given(lengths=ROW_LENGTHS, padding=PADDING, seed=SEEDS)
@example(lengths=[0, 0], padding=2, seed=0)
def test_a_batch_equals_its_rows_alone_in_any_order(condition, lengths, padding, seed) -> None:
    trajectory = trajectory_of(lengths, width_of(lengths, padding), seed, off_mask=math.nan)
    whole = credit_of(trajectory, cut(trajectory, condition), **PAPER, missing_eos_penalty=1.0)
    for i in range(len(lengths)):
        one = select_rows(trajectory, torch.tensor([i]))
        alone = credit_of(one, cut(one, condition), **PAPER, missing_eos_penalty=1.0)
        for name in PER_TOKEN:
            assert_near(getattr(alone, name)[0], getattr(whole, name)[i].double(), FORMULA)
    order = torch.arange(len(lengths)).flip(0)
    shuffled = select_rows(trajectory, order)
    other = credit_of(shuffled, cut(shuffled, condition), **PAPER, missing_eos_penalty=1.0)
    for name in PER_TOKEN:
        assert_near(getattr(other, name), getattr(whole, name)[order].double(), FORMULA)


@pytest.mark.parametrize("condition", CONDITIONS)
@PROPERTY
@given(lengths=ROW_LENGTHS, padding=st.integers(1, 5), seed=SEEDS)
def test_padding_on_either_side_changes_nothing(condition, lengths, padding, seed) -> None:
    width = width_of(lengths)
    narrow = trajectory_of(lengths, width, seed)
    wide = trajectory_of(lengths, width + padding, seed, prompt_width=3 + padding, off_mask=math.nan)
    first = credit_of(narrow, cut(narrow, condition), **PAPER)
    second = credit_of(wide, cut(wide, condition), **PAPER)
    mask = narrow.response_mask
    for name in PER_TOKEN:
        assert_near(getattr(second, name)[:, :width][mask], getattr(first, name)[mask].double(), FORMULA)
        assert torch.isfinite(getattr(second, name)).all()


# Options


def test_an_isolated_last_token_keeps_the_score_whole_under_mean() -> None:
    """Four tokens, no KL, score 2: `mean` alone quarters the score; isolated it stays 2."""
    base = trajectory_of([4], 4, 0)
    zero = torch.zeros(1, 4)
    trajectory = Trajectory(
        rollout=base.rollout, logprobs=zero, ref_logprobs=zero, values=zero, scores=torch.tensor([2.0])
    )
    ends = fixed_ngram_ends(base.response_mask, 4)
    options = {"kl_coef": 0.05, "gamma": 1.0, "lam": 1.0, "macro_reward": "mean"}
    assert_near(credit_of(trajectory, ends, **options).returns, [[0.5] * 4], FORMULA)
    isolated = isolate_last_token(ends, base.response_mask)
    assert_near(credit_of(trajectory, isolated, **options).returns, [[2.0] * 4], FORMULA)


# The objects


def test_batches_are_frozen_and_hold_what_they_came_from() -> None:
    trajectory = trajectory_of([3, 0, 2], 4, 0)
    batch = credit_of(trajectory, fixed_ngram_ends(trajectory.response_mask, 2), **PAPER)
    assert batch.trajectory is trajectory
    assert trajectory.response_mask is trajectory.rollout.response_mask
    assert [f.name for f in fields(PPOBatch)] == ["trajectory", "macro", *PER_TOKEN]
    for value, name in ((batch, "advantages"), (trajectory, "values"), (trajectory.rollout, "input_ids")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)


def test_nothing_is_modified_in_place() -> None:
    trajectory = trajectory_of([3, 0, 2], 4, 0)
    ends = fixed_ngram_ends(trajectory.response_mask, 2)
    before = [t.clone() for t in (*tensors_of(trajectory), ends)]
    credit_of(trajectory, ends, **PAPER, clip_reward_value=0.1, missing_eos_penalty=1.0, macro_reward="mean")
    for tensor, copy in zip((*tensors_of(trajectory), ends), before, strict=True):
        assert torch.equal(tensor, copy)
