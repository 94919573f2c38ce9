# SPDX-License-Identifier: Apache-2.0
"""An engine's log-probs beside the actor's, also where rollouts are drawn one iteration ahead."""

import logging
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cli_runs import read_jsonl
from closeness import FORMULA, assert_near, near
from dschat.base.errors import UserError
from dschat.models.layout import PassSize
from dschat.rollouts.engine import Generation
from dschat.training.iteration import Clock
from dschat.training.loop import work_of
from dschat.training.ppo.logprob_gap import check_gap
from factories import hf_logprobs, make_prompts, make_rollout, ppo_config, ppo_loop, random_ids, to_device, weights_of
from macro_actions.types import Trajectory
from resume_runs import AHEAD, DrawsAhead, ppo

FLOAT32 = SimpleNamespace(module=torch.nn.Linear(1, 1))
BFLOAT16 = SimpleNamespace(module=torch.nn.Linear(1, 1).bfloat16())
ROWS = PassSize(2)


def trajectory_with(*gaps):
    """Two responses of two tokens and one; the engine's log-probs are off by the gaps, the last one on padding."""
    own = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    rollout = make_rollout([([5], [6, 7]), ([5], [8])])
    drawn = own + torch.tensor(gaps).view(2, 2)
    return Trajectory(replace(rollout, drawn_logprobs=drawn), own, own, own, torch.zeros(2))


def gap_of(trajectory, actor, is_stale=False):
    return check_gap(trajectory.rollout, trajectory.logprobs, actor, 1.0, ROWS, is_stale)


def test_mean_and_largest_gap_of_the_response_tokens():
    metrics = gap_of(trajectory_with(3e-4, -6e-4, 0.0, 9.0), FLOAT32)
    gaps = {"rollout/logprob_gap": 3e-4, "rollout/logprob_gap_max": 6e-4, "rollout/logprob_mismatch": 0.0}
    assert metrics == near(gaps, FORMULA)


def test_tokens_that_differ_by_a_tenth_are_a_mismatch_whichever_is_more_likely():
    trajectory = trajectory_with(-0.11, 0.09, 0.3, 9.0)
    metrics = check_gap(trajectory.rollout, trajectory.logprobs, FLOAT32, 1.0, ROWS, must_be_close=False)
    assert metrics["rollout/logprob_mismatch"] == pytest.approx(2 / 3)
    assert metrics["rollout/logprob_gap"] == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_decoder_is_compared_where_it_rounds_otherwise(dtype, group, tmp_path):
    """In float32 its log-probs are those that are trained on; bf16 has 8 bits of each of some ten products."""
    config = ppo_config(tmp_path, ppo_epochs=2)
    ppo_loop(config, lambda p, r, rows: [1.0] * len(r), make_prompts(16), dtype=dtype).fit()
    for row in read_jsonl(tmp_path / "metrics.jsonl"):
        assert ("rollout/logprob_gap" in row) is (dtype == torch.bfloat16)
        if dtype == torch.bfloat16:
            assert 0 < row["rollout/logprob_gap"] <= row["rollout/logprob_gap_max"] < 0.1
            assert row["rollout/logprob_mismatch"] == 0


def test_other_weights_are_an_error():
    with pytest.raises(UserError, match="--rollout_engine.*differ from the actor's by 0.1 on average"):
        gap_of(trajectory_with(0.3, 0.0, 0.0, 0.0), FLOAT32)
    metrics = gap_of(trajectory_with(0.12, 0.0, 0.0, 0.0), BFLOAT16)
    assert metrics["rollout/logprob_gap"] == pytest.approx(0.04)
    with pytest.raises(UserError, match="rounding explains 0.05"):
        gap_of(trajectory_with(0.3, 0.0, 0.0, 0.0), BFLOAT16)


class OffEngine:
    """Stands in for an engine: the same responses of 1 to 3 tokens each time, log-probs that are off by a number."""

    def __init__(self, off):
        self.off, self.seeds = off, []

    @contextmanager
    def session(self, actor, same_weights=False):
        def draw(prompts, sampling, seeds):
            self.seeds.append(list(seeds))
            rows = [(ids, random_ids(1 + i % 3, i)) for i, ids in enumerate(prompts)]
            rollout = to_device(make_rollout(rows))
            mask = rollout.response_mask
            with torch.no_grad():
                own, _ = actor(rollout.input_ids, rollout.attention_mask, mask.shape[1], sampling.temperature)
            logprobs = torch.where(mask, own + self.off, 0.0)
            return Generation(replace(rollout, drawn_logprobs=logprobs), None, torch.zeros_like(rollout.finished))

        yield draw


def trainer_with(engine, folder, **flags):
    config = ppo_config(folder, temperature=0.8, rollout_engine="vllm", **flags)
    return ppo_loop(config, lambda p, r, rows: [1.0] * len(r), make_prompts(16), rollouts=engine)


def test_a_run_whose_engine_has_other_weights_stops_before_it_trains(group, tmp_path):
    trainer = trainer_with(OffEngine(0.01), tmp_path)
    before = weights_of(trainer.algorithm.models.actor)
    with pytest.raises(UserError, match="differ from the actor's by 0.01 on average"):
        trainer.fit()
    after = weights_of(trainer.algorithm.models.actor)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_gap_of_an_iteration():
    """Mean of 0.7, 0.69 and 1.5, then of 0.7, 0.69 and 3; the fourth is padding."""
    gap_of(trajectory_with(-0.7, -0.69, 1.5, -9.0), FLOAT32, is_stale=True)
    with pytest.raises(UserError, match="by 1.46 on average .an iteration explains 1.: it samples with other weights"):
        gap_of(trajectory_with(-0.7, -0.69, 3.0, -9.0), FLOAT32, is_stale=True)


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
        rollout = found.rows.rollout
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
        gaps.append((found.rows.logprobs - rollout.drawn_logprobs)[rollout.response_mask])
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
    assert "ahead" not in algorithm.state_dict().rollout  # the actor still has the weights that draw it
    algorithm.responses.accept()
    state = algorithm.state_dict()
    assert state.rollout["ahead"] == 1
    algorithm.models.rollouts.gone = True
    with caplog.at_level(logging.WARNING, "dschat"):
        without = algorithm.state_dict()
    assert "ahead" not in without.rollout and not any(name.startswith("ahead") for name in without.tensors)
    assert "cannot be finished now: no checkpoint has it" in caplog.text
