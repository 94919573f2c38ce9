# SPDX-License-Identifier: Apache-2.0
"""The estimators: what they declare, generalised advantage estimation over macro steps, leave-one-out baselines."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import rl_references as ref
from closeness import assert_near
from dschat.rl.estimators import ESTIMATORS, gae, rloo
from dschat.rl.needs import NEEDS
from dschat.rl.termination import fixed_ngram_ends
from rl_cases import PADDING, PROPERTY, ROW_LENGTHS, SEEDS, credit_of, mask_of, normal, trajectory_of, width_of


@pytest.mark.parametrize("name", sorted({*ESTIMATORS, *NEEDS}))
def test_an_estimator_needs_what_it_declares(name) -> None:
    """Returns for a critic alone; advantages of macro actions or of responses; of a row or of all to its prompt."""
    needs, options = NEEDS[name], {"kl_coef": 0.1, "samples": 3 if NEEDS[name].group else 1}
    trajectory = trajectory_of([6, 5, 4], 6, 0)
    trajectory = trajectory if needs.critic else replace(trajectory, values=None)
    ends, mask = fixed_ngram_ends(trajectory.response_mask, 2), trajectory.response_mask
    batch = credit_of(trajectory, ends, name, **options)
    assert (batch.returns is not None) is needs.critic
    alike = torch.where(mask, batch.advantages == batch.advantages[:, :1], True)
    assert bool(alike.all()) is not needs.macro_actions
    other = replace(trajectory, scores=trajectory.scores + torch.tensor([0.0, 9.0, 0.0]))
    first = credit_of(other, ends, name, **options).advantages[0]
    assert torch.equal(first, batch.advantages[0]) is not needs.group


# Values 0.5, 0.25, 1 and rewards 0, -0.5, 2.
# gamma 1, lam 0.5:   delta = -0.25, 0.25, 1;    A3 = 1, A2 = 0.25 + 0.5 = 0.75, A1 = -0.25 + 0.375 = 0.125.
# gamma 0.5, lam 0.5: delta = -0.375, -0.25, 1;  A3 = 1, A2 = -0.25 + 0.25 = 0,  A1 = -0.375.
# gamma 1, lam 1:     returns are the sums of the rewards to come: 1.5, 1.5, 2.
# gamma 1, lam 0:     advantages are the deltas.
@pytest.mark.parametrize(
    ("gamma", "lam", "advantages"),
    [
        (1.0, 0.5, [0.125, 0.75, 1.0]),
        (0.5, 0.5, [-0.375, 0.0, 1.0]),
        (1.0, 1.0, [1.0, 1.25, 1.0]),
        (1.0, 0.0, [-0.25, 0.25, 1.0]),
    ],
)
def test_gae_by_hand(gamma, lam, advantages) -> None:
    values = torch.tensor([[0.5, 0.25, 1.0, math.nan]])
    rewards = torch.tensor([[0.0, -0.5, 2.0, math.inf]])
    found, returns = gae(values, rewards, mask_of([3], 4), gamma, lam)
    assert found[0, :3].tolist() == advantages
    assert returns[0, :3].tolist() == [a + v for a, v in zip(advantages, [0.5, 0.25, 1.0], strict=True)]
    assert torch.isfinite(found).all() and torch.isfinite(returns).all()


@PROPERTY
@given(
    lengths=ROW_LENGTHS,
    padding=PADDING,
    seed=SEEDS,
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    off_mask=st.sampled_from([0.0, math.nan, math.inf, -math.inf]),
)
@example(lengths=[0, 0], padding=2, seed=0, gamma=1.0, lam=0.95, off_mask=math.nan)
def test_gae_is_the_double_sum(lengths, padding, seed, gamma, lam, off_mask) -> None:
    width = width_of(lengths, padding)
    mask = mask_of(lengths, width)
    values = normal((len(lengths), width), seed).masked_fill(~mask, off_mask)
    rewards = normal((len(lengths), width), seed + 1).masked_fill(~mask, off_mask)
    advantages, returns = gae(values, rewards, mask, gamma, lam)
    assert torch.isfinite(advantages).all() and torch.isfinite(returns).all()
    assert advantages.dtype == returns.dtype == torch.float32
    for i, length in enumerate(lengths):
        expected = ref.gae(values[i, :length].tolist(), rewards[i, :length].tolist(), gamma, lam)
        assert_near(advantages[i, :length], expected[0])
        assert_near(returns[i, :length], expected[1])


@PROPERTY
@given(lengths=ROW_LENGTHS, padding=PADDING, seed=SEEDS)
def test_gae_of_a_batch_is_gae_of_its_rows_to_the_bit(lengths, padding, seed) -> None:
    width = width_of(lengths, padding)
    mask = mask_of(lengths, width)
    values, rewards = normal((len(lengths), width), seed), normal((len(lengths), width), seed + 1)
    batch = gae(values, rewards, mask, 0.99, 0.95)
    for i, length in enumerate(lengths):
        own = slice(i, i + 1), slice(0, max(1, length))
        alone = gae(values[own], rewards[own], mask[own], 0.99, 0.95)
        for whole, part in zip(batch, alone, strict=True):
            assert torch.equal(whole[i, :length], part[0, :length])


def test_a_batch_without_macro_actions_is_finite() -> None:
    for columns in (0, 3):
        empty = torch.zeros(2, columns)
        advantages, returns = gae(empty, empty, empty.bool(), 1.0, 0.95)
        assert advantages.shape == returns.shape == (2, columns)
        assert not advantages.any() and not returns.any()


def test_gae_modifies_nothing() -> None:
    mask = mask_of([4, 2], 4)
    inputs = normal((2, 4), 0), normal((2, 4), 1), mask
    copies = [x.clone() for x in inputs]
    gae(*inputs, 1.0, 0.95)
    for x, copy in zip(inputs, copies, strict=True):
        assert torch.equal(x, copy)


# Leave one out.
@pytest.mark.parametrize(
    ("scores", "advantages"),
    [
        ([[1.0, 3.0], [-2.0, -2.5]], [[-2.0, 2.0], [0.5, -0.5]]),
        ([[1.0, 2.0, 6.0, 3.0]], [[1 - 11 / 3, 2 - 10 / 3, 6 - 2.0, 0.0 + 3 - 3.0]]),
    ],
)
def test_rloo_by_hand(scores, advantages) -> None:
    assert_near(rloo(torch.tensor(scores)), advantages)


def test_rloo_leaves_scores_out_that_do_not_count() -> None:
    scores = torch.tensor([[1.0, math.nan, 6.0], [math.inf, 5.0, math.nan], [math.nan, math.nan, math.nan]])
    assert_near(rloo(scores, scores.isfinite()), [[-5.0, 0, 5.0], [0, 0, 0], [0, 0, 0]])


def test_one_sample_has_no_baseline() -> None:
    assert_near(rloo(torch.tensor([[3.0], [4.0]])), [[0.0], [0.0]])


def test_rloo_rows_are_alone() -> None:
    scores = normal((5, 4), 0)
    assert_near(rloo(scores), torch.cat([rloo(row[None]) for row in scores]))
