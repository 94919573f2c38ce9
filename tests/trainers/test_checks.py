# SPDX-License-Identifier: Apache-2.0
"""The first number of a rollout that is not finite is named."""

from dataclasses import replace

import pytest
import torch

from dschat.rl.termination import fixed_ngram_ends
from dschat.rl.types import ScoredRollout
from dschat.run.distributed import first_over_ranks
from dschat.trainers.nonfinite import bad_rows
from rl_cases import credit_of, trajectory_of

TRAJECTORY = trajectory_of([3, 5, 2], 5, seed=0)


def batch_of(trajectory=TRAJECTORY):
    ends = fixed_ngram_ends(trajectory.response_mask, 2)
    return credit_of(trajectory, ends, kl_coef=0.1, gamma=1.0, lam=0.95)


def spoiled(x, row, column, value=float("nan")):
    y = x.clone()
    y[row, column] = value
    return y


def first(batch, logits=(), **beside):
    """The first name and its rows; None of a healthy batch."""
    rows = len(batch.trajectory.scores)
    bad_logits = torch.tensor([row in logits for row in range(rows)])
    found = ((name, bad.nonzero().flatten().tolist()) for name, bad in bad_rows(batch, bad_logits, beside))
    return next(((name, numbers) for name, numbers in found if numbers), None)


def test_a_healthy_batch_passes():
    assert first(batch_of()) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["logprobs", "ref_logprobs", "values"])
def test_the_first_field_of_a_trajectory_is_named_not_what_follows_from_it(name, bad):
    """A NaN among the log-probs makes kl, rewards, advantages and returns NaN, too."""
    broken = replace(TRAJECTORY, **{name: spoiled(getattr(TRAJECTORY, name), 1, 2, bad)})
    assert first(batch_of(broken)) == (name, [1])


def test_scores():
    assert first(batch_of(replace(TRAJECTORY, scores=torch.tensor([0.0, 1.0, float("nan")])))) == ("scores", [2])


def test_logits_come_first_and_the_sources_of_a_sum_before_it():
    broken = batch_of(replace(TRAJECTORY, values=spoiled(TRAJECTORY.values, 1, 2)))
    metric = torch.tensor([float("inf"), 0.0, 0.0])
    assert first(broken, logits=[2], metric=metric) == ("logits", [2])
    assert first(broken, metric=metric) == ("values", [1])
    assert first(batch_of(), metric=metric) == ("numbers of metric", [0])
    scored = batch_of(replace(TRAJECTORY, scores=metric))
    assert first(scored, length=torch.zeros(3), brevity=metric) == ("numbers of brevity", [0])
    assert first(scored, length=torch.zeros(3)) == ("scores", [0])
    sampled = ScoredRollout(TRAJECTORY.rollout, TRAJECTORY.ref_logprobs, metric)
    names = [name for name, bad in bad_rows(sampled, None, {"brevity": metric}) if bad.any()]
    assert names == ["numbers of brevity", "scores"]


@pytest.mark.parametrize("name", ["kl", "rewards", "advantages", "returns"])
def test_every_field_of_the_batch(name):
    batch = batch_of()
    assert first(replace(batch, **{name: spoiled(getattr(batch, name), 0, 1)})) == (name, [0])


def test_advantages_that_are_broken_before_whitening_are_told_from_those_that_it_breaks():
    batch = batch_of()
    everywhere = torch.full_like(batch.advantages, float("nan"))
    origin = replace(batch, advantages=everywhere, returns=spoiled(batch.returns, 1, 0))
    assert first(origin) == ("advantages", [1])
    names = [name for name, bad in bad_rows(replace(batch, advantages=everywhere), torch.zeros(3), {}) if bad.any()]
    places = [name for name, _ in bad_rows(batch, torch.zeros(3), {})]
    assert names == ["advantages"] and places.index("advantages") < places.index("returns") < len(places) - 1


def test_what_is_off_the_response_does_not_matter():
    assert first(replace(batch_of(), kl=spoiled(batch_of().kl, 2, 4))) is None


def test_only_rows_that_are_broken_on_the_response_are_named():
    batch = batch_of()
    broken = replace(batch, kl=spoiled(spoiled(batch.kl, 2, 4), 1, 0))  # row 2 has two tokens
    assert first(broken) == ("kl", [1])


def test_a_batch_of_one_position():
    trajectory = trajectory_of([1, 0], 1, seed=0)
    assert first(batch_of(trajectory)) is None
    for row in (0, 1):  # a score of an empty response is trained on nowhere, but its mean is logged
        scores = torch.tensor([float("nan") if i == row else 0.0 for i in (0, 1)])
        assert first(batch_of(replace(trajectory, scores=scores))) == ("scores", [row])


def test_one_process_agrees_with_itself():
    assert [first_over_ranks(place) for place in (None, 0, 3)] == [None, (0, 0), (3, 0)]
