# SPDX-License-Identifier: Apache-2.0
"""The first number that is not finite is named."""

from dataclasses import replace

import pytest
import torch

from dschat.errors import UserError
from dschat.rl.ppo_batch import ppo_batch
from dschat.rl.termination import fixed_ngram_ends
from dschat.trainers.checks import check_batch, check_number
from rl_cases import trajectory_of

TRAJECTORY = trajectory_of([3, 5, 2], 5, seed=0)


def batch_of(trajectory=TRAJECTORY):
    ends = fixed_ngram_ends(trajectory.response_mask, 2)
    return ppo_batch(trajectory, ends, kl_coef=0.1, gamma=1.0, lam=0.95)


def spoiled(x, row, column, value=float("nan")):
    y = x.clone()
    y[row, column] = value
    return y


def test_a_healthy_batch_passes():
    check_batch(batch_of(), 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["logprobs", "ref_logprobs", "values"])
def test_the_first_field_of_a_trajectory_is_named_not_what_follows_from_it(name, bad):
    """A NaN among the log-probs makes kl, rewards, advantages and returns NaN, too."""
    broken = replace(TRAJECTORY, **{name: spoiled(getattr(TRAJECTORY, name), 1, 2, bad)})
    with pytest.raises(UserError, match=rf"after 12 updates, {name} is not finite in rows \[1\]"):
        check_batch(batch_of(broken), 12)


def test_scores():
    with pytest.raises(UserError, match=r"scores is not finite in rows \[2\]"):
        check_batch(batch_of(replace(TRAJECTORY, scores=torch.tensor([0.0, 1.0, float("nan")]))), 0)


@pytest.mark.parametrize("name", ["kl", "rewards", "advantages", "returns"])
def test_every_field_of_the_batch(name):
    batch = batch_of()
    with pytest.raises(UserError, match=rf", {name} is not finite in rows \[0\]"):
        check_batch(replace(batch, **{name: spoiled(getattr(batch, name), 0, 1)}), 0)


def test_what_is_off_the_response_does_not_matter():
    check_batch(replace(batch_of(), kl=spoiled(batch_of().kl, 2, 4)), 0)


def test_only_rows_that_are_broken_on_the_response_are_named():
    batch = batch_of()
    broken = replace(batch, kl=spoiled(spoiled(batch.kl, 2, 4), 1, 0))  # row 2 has two tokens
    with pytest.raises(UserError, match=r"kl is not finite in rows \[1\]"):
        check_batch(broken, 0)


def test_a_batch_of_one_position():
    trajectory = trajectory_of([1, 0], 1, seed=0)
    check_batch(batch_of(trajectory), 0)
    with pytest.raises(UserError, match="scores"):
        check_batch(batch_of(replace(trajectory, scores=torch.tensor([float("nan"), 0.0]))), 0)


def test_check_number():
    check_number("the loss", 1.0, 0)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(UserError, match="after 4 updates, the loss is"):
            check_number("the loss", bad, 4)
