# SPDX-License-Identifier: Apache-2.0
"""One rollout ahead: with which weights each rollout is drawn, and what is said of it."""

import logging
from unittest import mock

import pytest
import torch

from cli_runs import read_jsonl
from closeness import assert_near
from dschat.trainers.iteration import Clock
from dschat.trainers.loop import work_of
from factories import hf_logprobs
from resume_runs import AHEAD, DrawsAhead, ppo


@pytest.fixture
def loop(group, tmp_path):
    """Two epochs of two rollouts, without evaluations."""
    loop = ppo(tmp_path, rollouts=DrawsAhead(4), eval_interval=0, **AHEAD)
    loop.algorithm.held_out = []
    return loop


def test_each_rollout_is_drawn_with_the_weights_of_an_iteration_ago(loop, tmp_path):
    """The first with those of the start, as the second; prompts are those of their iteration, in every epoch."""
    algorithm, weights, gaps, prompts = loop.algorithm, [], [], []
    collect = algorithm.collect

    def noting(work, iteration, clock):
        weights.append([p.detach().clone() for p in algorithm.models.actor.module.inner.parameters()])
        found = collect(work, iteration, clock)
        rollout = found.rollout.rollout
        index = [algorithm.prompts[number].index for rows in work for number in rows]
        assert rollout.prompt_index.tolist() == index
        prompts.append(index)
        actor = list(algorithm.models.actor.module.inner.parameters())
        with torch.no_grad():
            for parameter, before in zip(actor, weights[max(iteration - 1, 0)], strict=True):
                parameter.copy_(before)
            for row, (number, response) in enumerate(
                zip(sum(map(list, work), []), rollout.response_rows(), strict=True)
            ):
                prompt = algorithm.prompts[number].prompt_ids
                own, _ = hf_logprobs(algorithm.models.actor.module.inner, (prompt, response), 1.0)
                assert_near(rollout.drawn_logprobs[row, : len(response)], own)
            for parameter, now in zip(actor, weights[-1], strict=True):
                parameter.copy_(now)
        gaps.append((found.rollout.logprobs - rollout.drawn_logprobs)[rollout.response_mask])
        assert found.is_stale == (iteration > 0)
        return found

    algorithm.collect = noting
    loop.fit()
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "rollout/staleness" in row]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1] and len(set(map(tuple, prompts))) == 4
    clip = torch.tensor(2.0).log()
    for row, gap in zip(rows, gaps, strict=True):
        assert row["rollout/logprob_gap"] == pytest.approx(float(gap.abs().mean()), rel=1e-5)
        assert row["rollout/importance_clipped"] == pytest.approx(float((gap > clip).float().mean()))
    assert rows[0]["rollout/logprob_gap"] < 1e-5 < 1e-3 < rows[1]["rollout/logprob_gap"]


def test_what_a_checkpoint_holds_of_the_rollout_ahead(loop, caplog):
    """Nothing where a server has gone: the run goes on from it with a rollout of the weights of then."""
    algorithm = loop.algorithm
    algorithm.collect(work_of(algorithm, algorithm.config, loop.run.plan, 0), 0, Clock())
    assert "ahead" not in algorithm.state_dict().numbers  # the actor still has the weights that draw it
    algorithm.ahead.accept()
    state = algorithm.state_dict()
    assert state.numbers["ahead"] == [1, 1]
    algorithm.models.rollouts.gone = True
    with caplog.at_level(logging.WARNING, "dschat"):
        without = algorithm.state_dict()
    assert "ahead" not in without.numbers and not any(name.startswith("ahead") for name in without.tensors)
    assert "cannot be finished now: no checkpoint has it" in caplog.text
    algorithm.ahead._upcoming = None
    with mock.patch("dschat.trainers.ahead.world_size", lambda: 2), caplog.at_level(logging.WARNING, "dschat"):
        algorithm.ahead.load(state)
        assert algorithm.ahead.take([], 1) is None  # two processes have other prompts each
    assert "drawn ahead by 1 processes is drawn again" in caplog.text
