# SPDX-License-Identifier: Apache-2.0
"""A judge model as a source of scores: points and ranks by hand, what is asked, and what happens where it fails."""

import threading
from dataclasses import replace

import pytest
import torch

from closeness import assert_near
from dschat.base.chat_servers import Endpoint
from dschat.base.errors import UserError
from dschat.base.reply_cache import Reply, ReplyCache
from dschat.judge.answers import UnreadableAnswer
from dschat.judge.client import JudgeClient
from dschat.judge.costs import Prices, Spending
from dschat.judge.grading import centred_ranks, read_answer, weighted_points
from dschat.judge.rubrics import Rubric
from dschat.judge.scores import JudgeScores, JudgeSettings, shuffled
from dschat.run import stop
from dschat.run.stop import Stopped
from dschat.scoring.source import EpisodeRecords, ResponseTexts, Weighted
from dschat.scoring.weighted import WeightedScores
from factories import EOS, make_prompt, make_rollout, ragged_rows
from fake_judge import graded_in, places_by_good, points_by_good

POINTS = Rubric(
    "Grade the summary.",
    response_name="summary",
    criteria={"brevity": "Is it short?", "truth": "Is it true?"},
    weights={"brevity": 1.0, "truth": 3.0},
)
RANKING = Rubric("Rank the answers.", judge="ranking", prompt_name="question", response_name="answer")


@pytest.fixture
def server(server):
    """It counts."""
    server.answer = points_by_good
    return server


def texts_of(*responses, prompts=None):
    prompts = prompts or [f"p{n}" for n in range(len(responses))]
    rows = [make_prompt([], prompt, n).row for n, prompt in enumerate(prompts)]
    return ResponseTexts(prompts, list(responses), rows, [True] * len(rows))


def rollout_of(count, samples=1):
    rows = ragged_rows([2] * count, [3] * count)
    rollout = make_rollout([(prompt, [*response, EOS]) for prompt, response in rows])
    numbers = torch.arange(count)
    return replace(rollout, prompt_index=numbers // samples, sample_index=numbers % samples)


def judge_of(server, folder, rubric=POINTS, skips=False, spending=None, concurrency=4, **endpoint):
    settings = {"model": "m", "base_url": server.url, "max_tokens": 50, "timeout": 5.0, "tries": 2, "key": "none"}
    cache = ReplyCache(folder / "cache")
    client = JudgeClient(Endpoint(**(settings | endpoint)), cache, spending or Spending(None))
    return JudgeScores(client, JudgeSettings(rubric, concurrency, 60.0, skips))


# -- formulas


def test_points_are_weighted_by_hand():
    """(3 · 8 + 1 · 2) / 40 = .65; a rubric without criteria has one number, of which 10 is 1."""
    assert weighted_points({"truth": 8, "brevity": 2}, {"truth": 3.0, "brevity": 1.0}) == pytest.approx(
        0.65, abs=1e-12
    )
    assert weighted_points({"score": 7}, {}) == pytest.approx(0.7, abs=1e-12)
    assert weighted_points({"a": 0, "b": 0}, {"a": 1.0, "b": 2.0}) == 0


@pytest.mark.parametrize(
    ("places", "scores"),
    [
        ([1], [0.0]),
        ([2, 1], [-0.5, 0.5]),
        ([1, 2, 2], [0.5, -0.25, -0.25]),
        ([4, 4, 1, 9], [0.0, 0.0, 0.5, -0.5]),  # places may have gaps; 4 beats one of three and ties with one
    ],
)
def test_ranks_are_centred_by_hand(places, scores):
    assert centred_ranks(places) == pytest.approx(scores, abs=1e-12)
    assert sum(centred_ranks(places)) == pytest.approx(0.0, abs=1e-12)


# -- points


def test_points_of_each_criterion_are_parts_of_the_score(server, tmp_path):
    """ "good" twice: 2 points of brevity and 4 of truth, (2 + 3 · 4) / 40 = .35."""
    scores = judge_of(server, tmp_path)(rollout_of(3), texts_of("good", "bad", "good good"))
    assert_near(scores.values, [0.175, 0.0, 0.35])
    assert scores.values.dtype == torch.float32 and set(scores.parts) == {"judge_brevity", "judge_truth"}
    assert_near(scores.parts["judge_brevity"], [0.1, 0.0, 0.2])
    assert_near(scores.parts["judge_truth"], [0.2, 0.0, 0.4])
    assert scores.missing is None and scores.measured == {"judge/cached": (0.0, 3.0)}


def test_what_a_judge_reads(server, tmp_path):
    judge_of(server, tmp_path)(rollout_of(1), texts_of("good <b>", prompts=["the post"]))
    (body,) = server.bodies
    instructions = body["messages"][0]["content"]
    assert instructions.startswith("Grade the summary.\n\nCriteria:\n- brevity: Is it short?\n- truth: Is it true?")
    assert '{"reason": "one or two sentences", "brevity": 0 to 10, "truth": 0 to 10}' in instructions
    assert graded_in(body["messages"]) == {"prompt": "the post", "summary": "good <b>"}
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["reason", "brevity", "truth"]
    assert schema["properties"]["truth"] == {"type": "integer", "enum": list(range(11))}


def test_no_text_is_asked_about_twice(server, tmp_path):
    """Not in a rollout, and not in a later one of the same rubric."""
    judge = judge_of(server, tmp_path)
    texts = texts_of("good", "good", "bad", prompts=["p", "p", "p"])
    first = judge(rollout_of(3), texts)
    again = judge(rollout_of(3), texts)
    assert len(server.bodies) == 2 and first.values[0] == first.values[1] > first.values[2]
    assert torch.equal(first.values, again.values) and again.measured == {"judge/cached": (2.0, 2.0)}
    judge_of(server, tmp_path, replace(POINTS, task="Another task."))(rollout_of(3), texts)
    assert len(server.bodies) == 4


# -- rankings


def test_a_group_is_one_question(server, tmp_path):
    """Two prompts of three responses: goods 0 2 1 and 1 1 0 give −.5 .5 0 and .25 .25 −.5."""
    server.answer = places_by_good
    texts = texts_of("bad", "good good", "one good", "good a", "good b", "bad", prompts=["p"] * 3 + ["q"] * 3)
    scores = judge_of(server, tmp_path, RANKING)(rollout_of(6, samples=3), texts)
    assert_near(scores.values, [-0.5, 0.5, 0.0, 0.25, 0.25, -0.5])
    assert not scores.parts and len(server.bodies) == 2
    shown = sorted(graded_in(body["messages"])["question"] for body in server.bodies)
    assert shown == ["p", "q"]
    schema = server.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["reason", "answer-1", "answer-2", "answer-3"]
    assert schema["properties"]["answer-1"]["enum"] == [1, 2, 3]


def test_no_response_chooses_the_place_where_it_is_shown():
    """Of 200 pairs, one that begins with "!" comes first in about half: 100 ± 28 are four standard deviations."""
    first = [shuffled([f"good {number}", f"!bad {number}"])[0] for number in range(200)]
    assert 72 <= sum(text.startswith("!") for text in first) <= 128


def test_what_needs_no_ranking_is_not_asked(server, tmp_path):
    """A response alone, as in evaluations, and responses that are all equal."""
    judge = judge_of(server, tmp_path, RANKING)
    assert judge(rollout_of(2), texts_of("good", "bad")).values.tolist() == [0.0, 0.0]
    assert judge(rollout_of(2, samples=2), texts_of("good", "good", prompts=["p"] * 2)).values.tolist() == [0.0, 0.0]
    assert not server.bodies


# -- episodes


def test_episodes_are_read_with_both_sides_and_failed_ones_are_not(server, tmp_path):
    opening = [{"role": "user", "content": "Guess."}]
    first = [*opening, {"role": "assistant", "content": "good\n\nUser: well done"}, {"role": "user", "content": "no"}]
    texts = texts_of("good no", "bad")
    rows = [replace(row, prompt=None, messages=opening) for row in texts.rows]
    records = EpisodeRecords(
        turn_rewards=torch.zeros(2, 4),
        failed=torch.tensor([False, True]),
        done=torch.tensor([True, False]),
        messages=[first, []],
        rewards=[[0.0], []],
        samplings=[],
    )
    scores = judge_of(server, tmp_path)(rollout_of(2), replace(texts, rows=rows, episodes=records))
    assert_near(scores.values[:1], [0.175])
    assert scores.values[1].isnan() and len(server.bodies) == 1
    shown = graded_in(server.bodies[0]["messages"])
    assert shown["prompt"] == "Guess."
    assert shown["summary"] == "Assistant:\n| good\n| \n| User: well done\n\nUser:\n| no"
    assert "every line that somebody wrote in it begins with a bar" in server.bodies[0]["messages"][0]["content"]


# -- failures


def completion_of(text):
    """A step of `FakeJudge.plan`: a completion with this text."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return 200, {"model": "m", "choices": [choice]}, {}


def test_an_answer_that_cannot_be_read_is_asked_for_once_more_and_then_cached(server, tmp_path):
    """A later run takes the repaired answer, without a request, as one cached answer of one question."""
    server.plan.append(completion_of('{"brevity": 11, "truth": 1}'))
    assert_near(judge_of(server, tmp_path)(rollout_of(1), texts_of("good")).values, [0.175])
    assert len(server.bodies) == 2
    request = server.bodies[1]["messages"][-1]["content"]
    assert "cannot be read as points: brevity is 11, not a number from 0 to 10" in request
    assert '"brevity": 0 to 10' in request
    again = judge_of(server, tmp_path)(rollout_of(1), texts_of("good"))
    assert_near(again.values, [0.175])
    assert len(server.bodies) == 2 and again.measured == {"judge/cached": (1.0, 1.0)}


def test_requests_that_a_rollout_gave_up_do_not_touch_the_next_one(server, tmp_path):
    """Their answers come during the next rollout and cannot be read: the repetition is not sent, and the next rollout
    has all of its scores.
    """
    released = threading.Event()

    def answer(messages):
        if any("slow" in text for text in graded_in(messages).values()):
            released.wait(20)
            return "no points"
        released.set()  # the next rollout has begun
        return points_by_good(messages)

    judge = judge_of(server, tmp_path, skips=True, timeout=60.0)
    judge(rollout_of(3), texts_of("good 5", "good 6", "good 7"))  # opens the connection, which takes long somewhere
    server.answer = answer
    judge._settings = replace(judge._settings, patience=1.0)
    assert judge(rollout_of(3), texts_of("slow 1", "slow 2", "slow 3")).values.isnan().all()
    sent = len(server.bodies)
    assert sent == 6, "a request that was given up before it was sent has no repetition"
    given_up = judge._client.round
    judge._settings = replace(judge._settings, patience=60.0)
    scores = judge(rollout_of(4), texts_of("good", "good 2", "good 3", "good 4"))
    for thread in threading.enumerate():
        if thread.name.endswith("(work)"):  # of the first rollout: its answers may arrive after those of the second
            thread.join(30)
    assert not scores.values.isnan().any()
    assert given_up.stop.is_set() and not judge._client.stop.is_set()
    assert len(server.bodies) == sent + 4


def test_nonsense_stops_the_run_or_costs_its_response(server, tmp_path):
    server.answer = lambda messages: "no" if graded_in(messages).get("prompt") == "p1" else points_by_good(messages)
    texts = texts_of("good", "good", "bad")
    with pytest.raises(UserError) as caught:
        judge_of(server, tmp_path)(rollout_of(3), texts)
    message = str(caught.value)
    assert message.startswith("--reward_judge: an answer of the judge cannot be read, nor its repetition: it has no")
    for words in ("1 of 3 questions", "--resume_from_checkpoint", "--on_reward_error skip"):
        assert words in message
    weighted = WeightedScores([Weighted(None, 1.0, judge_of(server, tmp_path, skips=True))], skips=True)
    filled = weighted(rollout_of(3), texts)
    assert filled.missing.tolist() == [False, True, False]
    assert_near(filled.values, [0.175, 0.0875, 0.0])  # the mean of the others
    assert_near(filled.parts["judge_truth"], [0.2, 0.1, 0.0])


def test_the_limit_of_costs_ends_the_run_even_if_failures_are_skipped(server, tmp_path):
    """Each answer has 100 + 10 tokens at a dollar; the next one could cost its bytes and 50 tokens more."""
    spending = Spending(Prices(1.0, 1.0), 0.004, "--judge_max_cost")
    judge = judge_of(server, tmp_path, skips=True, spending=spending, concurrency=1)
    with pytest.raises(UserError, match="--reward_judge: --judge_max_cost 0.004: .* Raise the limit and resume"):
        judge(rollout_of(30), texts_of(*["good " * n for n in range(30)]))
    assert 0 < spending.cost <= 0.004 and 0 < len(server.bodies) < 30


def test_what_is_spent_between_two_rollouts_is_counted_once(server, tmp_path):
    """An answer costs 110 tokens at a dollar a million; a given-up request is paid for after its rollout."""
    spending = Spending(Prices(1.0, 1.0))
    judge = judge_of(server, tmp_path, spending=spending)
    first = judge(rollout_of(1), texts_of("good"))
    spending.add(1000, 0)
    second = judge(rollout_of(2), texts_of("good 2", "good 3"))
    assert first.measured["judge/cost"] == (pytest.approx(110e-6), 1.0)
    assert second.measured["judge/cost"] == (pytest.approx(1000e-6 + 2 * 110e-6), 2.0)


def test_a_signal_ends_the_wait_for_a_judge(server, tmp_path, monkeypatch):
    server.plan.extend(["timeout"] * 4)
    monkeypatch.setattr(stop, "_received", 15)
    with pytest.raises(Stopped):
        judge_of(server, tmp_path, timeout=60.0)(rollout_of(4), texts_of("a", "b", "c", "d"))


def test_sums_with_other_sources_keep_the_criteria(server, tmp_path):
    class Ones:
        model = None

        def __call__(self, rollout, texts):
            return torch.ones(2)

    both = WeightedScores([Weighted("ones", 0.5, Ones()), Weighted("judge", 2.0, judge_of(server, tmp_path))])
    scores = both(rollout_of(2), texts_of("good", "bad"))
    assert_near(scores.values, [0.5 + 2 * 0.175, 0.5])
    assert list(scores.parts) == ["ones", "judge", "judge_brevity", "judge_truth"]


# -- reading of answers and rubrics


def numbers_in(text, refusal=""):
    return read_answer(Reply(text, refusal, "served"), ["a", "b"], 0, 10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty and has no JSON object with a, b"),
        ('{"a": 3}', "b is missing"),
        ('{"a": 3, "b": "7"}', "b is '7', not a number from 0 to 10"),
        ('{"a": true, "b": 1}', "a is True"),
        ('{"a": 1, "b": 2} {"a": 2, "b": 2}', "contradict"),
    ],
)
def test_answers_that_cannot(text, words):
    with pytest.raises(UnreadableAnswer, match=words):
        numbers_in(text)


def test_a_refusal_is_no_answer():
    with pytest.raises(UnreadableAnswer, match="refused"):
        numbers_in('{"a": 1, "b": 1}', "I will not")
