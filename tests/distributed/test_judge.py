# SPDX-License-Identifier: Apache-2.0
"""A judge on two processes gives the scores of one process, is paid for each question once, and fails on both."""

import json

import pytest

from closeness import UPDATE, assert_weights_near, near
from fake_judge import judge_server
from judge_runs import PRICES, URL, judged_run, points_by_length, refusal

pytestmark = [pytest.mark.xdist_group("launcher"), pytest.mark.slow]

# Dollars for an answer of the fake judge, which says that it read 100 tokens and wrote 10.
COST = (100 * PRICES["judge_price_in"] + 10 * PRICES["judge_price_out"]) / 1e6


@pytest.fixture(scope="module")
def server():
    with judge_server() as judge, pytest.MonkeyPatch.context() as patch:
        patch.delenv("JUDGE_API_KEY", raising=False)
        patch.setenv(URL, judge.url)
        judge.answer = points_by_length
        judge.refuse_when(refusal)
        yield judge


@pytest.fixture(scope="module")
def outputs(server, run_cases):
    return run_cases("two-judged", (), ("judged",))


def questions_of(server, start=0):
    """Questions, from number `start` on, to the model "m", which refuses nothing."""
    return [json.dumps(body["messages"]) for body in server.bodies[start:] if body["model"] == "m"]


def scores_of(text):
    """The scores in a sample file."""
    return [json.loads(line)["score"] for line in text.splitlines()]


@pytest.mark.usefixtures("group")
def test_two_processes_have_the_scores_of_one(outputs, server, tmp_path):
    """In rollouts and evaluations; no question is asked twice, and the costs of both ranks are added up."""
    asked_by_two = questions_of(server)
    begun = len(server.bodies)
    expected, expected_metrics, expected_samples = judged_run(tmp_path / "judged", server.url)
    asked_by_one = questions_of(server, begun)
    assert asked_by_one and sorted(asked_by_two) == sorted(asked_by_one)
    assert len(set(asked_by_two)) == len(asked_by_two)

    result = outputs.numbers("judged")
    rollouts = 0
    for row, expected_row in zip(result["metrics"], expected_metrics, strict=True):
        assert {name: row[name] for name in expected_row} == near(expected_row, 8 * UPDATE, scale=0.1)
        if "objective/scores" in row:
            assert row["judge/cost"] == near(COST)  # per response: all responses differ, so each is a question
            rollouts += 1
    assert rollouts == 2
    assert expected_samples and result["samples"].keys() == expected_samples.keys()
    for name, expected_text in expected_samples.items():
        expected_scores = scores_of(expected_text)
        assert expected_scores and scores_of(result["samples"][name]) == expected_scores
    assert_weights_near(outputs.tensors("judged"), expected)


def test_a_failure_on_one_rank_ends_both_with_its_message(outputs):
    """Only one rank has the prompt that the judge refuses."""
    first, second = (outputs.numbers("judged-refused", rank) for rank in (0, 1))
    assert first == second
    assert first.startswith("--reward_judge: ")
    assert "not this" in first
    assert "1 of 4 questions of this rollout have no answer" in first
    assert "--resume_from_checkpoint" in first
    assert "--on_reward_error skip" in first
