# SPDX-License-Identifier: Apache-2.0
"""Training on the scores of a judge model: resume, groups, and what is logged."""

from functools import partial

import pytest

from dschat.base.chat_servers import Endpoint
from dschat.base.reply_cache import ReplyCache
from dschat.judge.client import JudgeClient
from dschat.judge.costs import Spending
from dschat.judge.rubrics import Rubric
from dschat.judge.scores import JudgeScores, JudgeSettings
from fake_judge import graded_in
from resume_runs import RLOO, check_every_stop, ppo, result_of

POINTS = Rubric("Grade it.", criteria={"a": "Is it?", "b": "Is it?"}, weights={"a": 1.0, "b": 2.0})
RANKING = Rubric("Rank them.", judge="ranking")


def by_length(messages):
    """Points and places by the lengths of the texts."""
    _, *responses = graded_in(messages).items()
    lengths = {name: len(text) for name, text in responses}
    if len(responses) > 1:
        places = {name: 1 + sum(other > length for other in lengths.values()) for name, length in lengths.items()}
        return str(places).replace("'", '"')
    return f'{{"a": {lengths["response"] % 11}, "b": {lengths["response"] % 7}}}'


@pytest.fixture
def server(server):
    server.answer = by_length
    return server


def judged_ppo(folder, server, rubric, **flags):
    """Runs of step 3 whose cache lies in the output folder."""
    endpoint = Endpoint("m", server.url, 50, 5.0, 2, "none")
    cache = ReplyCache(folder / ".judge-cache")
    client = JudgeClient(endpoint, cache, Spending(None))
    return ppo(folder, reward=JudgeScores(client, JudgeSettings(rubric, 3, 60.0, False)), **flags)


RUNS = {"points": (POINTS, {}, 61), "ranking": (RANKING, RLOO, 47)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["points", "ranking"])
def test_a_judged_run_stops_anywhere(name, server, group, tmp_path):
    rubric, flags, every = RUNS[name]
    make = partial(judged_ppo, server=server, rubric=rubric, **flags)
    assert check_every_stop(make, tmp_path, every, first=20) > 60
    assert max(server.answered.values()) <= 1 + 3 * 60  # bounded by the folders, each of which asks once


def test_points_are_logged_by_criterion(server, group, tmp_path):
    """The mean score is (a + 2 b) / 3 of the means of the criteria, in rollouts and in evaluations."""
    _, rows, samples = result_of(judged_ppo(tmp_path / "out", server, POINTS), tmp_path / "out")
    for prefix, count in (("objective/", 4), ("eval/", 3)):
        judged = [row for row in rows if f"{prefix}judge_a" in row]
        assert len(judged) >= count
        for row in judged:
            mean = (row[f"{prefix}judge_a"] + 2 * row[f"{prefix}judge_b"]) / 3
            assert row[f"{prefix}scores"] == pytest.approx(mean, abs=1e-6)
    assert all('"judge_a": ' in text for text in samples.values())
    assert set(server.answered.values()) == {1}
