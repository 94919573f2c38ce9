# SPDX-License-Identifier: Apache-2.0
"""Training on episodes: resume, signals, groups, and what an update reads."""

from functools import partial

import pytest
import torch

from closeness import assert_near
from dschat.base.errors import UserError
from dschat.run import stop
from dschat.run.state import SeedKind
from dschat.run.stop import Stopped
from dschat.training.ppo import evaluation
from dschat.turns import step3 as build
from dschat.turns.environments import EnvironmentPool, EpisodeProcess
from factories import batch_of_iteration, collected, ppo_config
from fake_judge import graded_in, judge_server
from macro_actions.masked import last_true
from resume_runs import check_every_stop
from turn_cases import episode_loop, write_environments

RUNS = {
    "gae": {"termination_condition": "turn", "ppo_epochs": 2, "gamma": 0.9, "missing_eos_penalty": 0.5},
    "rloo_turns": {
        "advantage_estimator": "rloo_turns",
        "samples_per_prompt": 2,
        "per_device_generation_batch_size": 4,
        "ngram": 2,
    },
}


@pytest.fixture
def environments(tmp_path):
    return write_environments(tmp_path)


@pytest.mark.parametrize("name", ["gae", pytest.param("rloo_turns", marks=pytest.mark.slow)])
def test_a_run_on_episodes_stops_anywhere(name, environments, group, tmp_path):
    """In the sampling of episodes, in their scoring, and between updates on them: the resumed run is the same."""
    make = partial(episode_loop, environment=f"{environments}:Random", **RUNS[name])
    assert check_every_stop(make, tmp_path, every=41, first=3) > 8


def test_a_signal_ends_a_wait_for_environments(environments, monkeypatch):
    pool = EnvironmentPool(f"{environments}:Hangs", 60.0, 2)
    with pool.episodes(1) as processes:
        monkeypatch.setattr(stop, "_received", 15)
        with pytest.raises(Stopped):
            pool.call(processes, [("reset", {"prompt": "a"}, 0)])
    pool.close()
    with pytest.raises(UserError, match="has ended"):
        EpisodeProcess(pool._address, 1.0)


def test_episodes_of_a_prompt_begin_alike(environments, group, tmp_path):
    """Their environments have one seed, and the replies have seeds of their own."""
    loop = episode_loop(tmp_path / "out", f"{environments}:Seeds", **RUNS["rloo_turns"])
    rows = collected(loop, [list(range(8))]).batch
    rewards = rows.scored.segment_rewards.sum(1)
    assert torch.equal(rewards[0::2], rewards[1::2])
    assert len(set(rewards.tolist())) == 8  # one seed for each prompt
    assert torch.equal(rows.scored.scores, rewards)
    responses = rows.rollout.response_rows()
    assert any(first != second for first, second in zip(responses[0::2], responses[1::2], strict=True))


def test_the_batch_of_an_episode(environments, group, tmp_path):
    """Rewards stand on the last tokens of turns; the sum of a row is its score less the KL, which is 0 at first."""
    loop = episode_loop(tmp_path / "out", f"{environments}:Random", **RUNS["gae"] | {"missing_eos_penalty": None})
    batch = batch_of_iteration(loop, [list(range(8))])
    mask = batch.response_mask
    rollout = batch.rollout
    is_episode = rollout.attention_mask[:, rollout.prompt_width :]
    assert (is_episode & ~mask).any()  # there are holes
    assert_near(batch.rewards.sum(1), batch.trajectory.scores)
    turn_rewards = batch.trajectory.segment_rewards
    assert not turn_rewards[~last_true(mask)].any() and int((turn_rewards > 0).sum(1).max()) > 1
    assert not batch.rewards[~mask].any() and not batch.advantages[~mask].any()
    turns = [len(runs) for runs in rollout.response_runs()]
    assert batch.macro.mask.sum(1).tolist() == turns and max(turns) > 1
    # λ = .95 and γ = .9 by turn, from the values before the turns' tokens (σ equal: their means).
    row = turns.index(max(turns))
    lengths = batch.macro.lengths[row].tolist()[: turns[row]]
    values = [float(part.mean()) for part in batch.trajectory.values[row][mask[row]].split(lengths)]
    rewards = [float(part.sum()) for part in batch.rewards[row][mask[row]].split(lengths)]
    expected: list[float] = []
    for turn in reversed(range(turns[row])):
        following = values[turn + 1] if turn + 1 < turns[row] else 0.0
        delta = rewards[turn] + 0.9 * following - values[turn]
        expected.insert(0, delta + 0.9 * 0.95 * (expected[0] if expected else 0.0))
    found = [float(part[0]) for part in batch.advantages[row][mask[row]].split(lengths)]
    assert_near(torch.tensor(found), expected)


def test_all_environments_fail(environments, group, tmp_path):
    """No episode has a token, and the rollout is left out as one without scores."""
    faults = [{"fault": "reset"}] * 16
    options = {"on_reward_error": "skip", "on_nonfinite": "skip", "eval_interval": 0}
    loop = episode_loop(tmp_path / "out", f"{environments}:Faulty", rows=faults, **options)
    assert collected(loop, [list(range(8))]) is None


def test_an_evaluation_that_others_may_not_wait_for(tmp_path, monkeypatch, caplog):
    """256 episodes of each of two processes are 8 calls after each other: 8 · 60 s · (8 + 1) are above 1800 s."""
    config = ppo_config(tmp_path, environment="games.py:Guess")
    build.warn_of_wait(config, 600)
    assert not caplog.text  # one process waits for no other
    monkeypatch.setattr(build, "world_size", lambda: 2)
    build.warn_of_wait(config, 128)
    assert not caplog.text  # 2 calls: 1080 s
    build.warn_of_wait(config, 600)
    assert "has 512 episodes" in caplog.text and "takes 4320 s" in caplog.text and "--ddp_timeout 1800" in caplog.text
    assert "Raise --environment_workers (32), or lower --eval_prompts or --environment_timeout" in caplog.text
    config = ppo_config(tmp_path, environment="games.py:Guess", eval_iters=128, per_device_eval_batch_size=4)
    build.warn_of_wait(config, 600)
    assert "has 512 episodes" in caplog.messages[1] and "or lower --eval_iters or" in caplog.messages[1]


def test_an_episode_that_is_answered_twice_is_in_no_metric(environments, group, tmp_path, monkeypatch):
    """Of three held-out prompts, the second of two processes has one, and plays as many episodes as the first."""
    loop = episode_loop(tmp_path / "out", f"{environments}:Counts", max_turns=2)
    monkeypatch.setattr(evaluation, "world_size", lambda: 2)
    monkeypatch.setattr(evaluation, "rank", lambda: 1)
    counts = []

    def score(generation, texts):
        counts.append((len(texts.rows), texts.counted))
        return loop.algorithm.score_with_credit(generation, texts)

    evaluation.evaluate_responses(
        loop.algorithm.held_out,
        loop.algorithm.tokenizer,
        lambda examples: loop.algorithm.sampler.sample(examples, SeedKind.EVALUATION, 0),
        score,
    )
    assert counts == [(2, 1)]


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Flags of a judge that gives a point for each turn of the assistant."""
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    file = tmp_path / "rubric.toml"
    file.write_text('task = "Grade the game."\nresponse = "game"\n')

    def by_turns(messages):
        return f'{{"score": {min(10, graded_in(messages)["game"].count("Assistant:"))}}}'

    with judge_server() as server:
        server.answer = by_turns
        flags = {"reward_judge": str(file), "judge_model": "m", "judge_url": server.url}
        yield flags | {"judge_cache": str(tmp_path / "answers")}


def test_a_judge_reads_whole_episodes(judged, environments, group, tmp_path):
    """Beside the environment, whose rewards stand on the turns; the judge's score is what the last token adds."""
    flags = RUNS["gae"] | {"missing_eos_penalty": None} | judged
    batch = collected(episode_loop(tmp_path / "out", f"{environments}:Random", **flags), [list(range(8))]).batch
    turns = torch.tensor([len(runs) for runs in batch.rollout.response_runs()])
    assert_near(batch.scored.scores - batch.scored.segment_rewards.sum(1), turns / 10.0)
    assert len(set(turns.tolist())) > 1
