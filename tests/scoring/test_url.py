# SPDX-License-Identifier: Apache-2.0
"""A server of scores that is slow, wrong, gone or back again: recovery, or a message that names the flag."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from dschat.base.errors import UserError
from dschat.run import stop
from dschat.run.stop import Stopped
from dschat.scoring.source import ResponseTexts
from dschat.scoring.url import UrlScores, UrlSettings
from factories import EOS, make_prompt, make_rollout
from fake_score_server import StandIn, by_length

ROLLOUT = make_rollout([([5], [6]), *[([5], [6, EOS])] * 4])
TEXTS = ResponseTexts(
    [f"p{n}" for n in range(5)],
    ["a", "bb", "ccc", "dd", "e"],
    [make_prompt([], f"p{n}", n).row for n in range(5)],
    ROLLOUT.finished.tolist(),
)
LENGTHS = [1.0, 2.0, 3.0, 2.0, 1.0]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waits of hundredths of seconds."""
    monkeypatch.setattr("dschat.scoring.url.FIRST_WAIT", 0.01)
    monkeypatch.setattr("dschat.scoring.url.MAX_WAIT", 0.05)


@pytest.fixture
def server():
    """server(*answers): a stand-in, stopped at the end."""
    started = []

    def start(*answers, port=0):
        started.append(StandIn(*answers, port=port))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def ask(url, batch=2, timeout=5.0, patience=2.0, skips=False):
    return UrlScores(UrlSettings(url, batch, timeout, patience, skips))(ROLLOUT, TEXTS)


def answering(status, body):
    return lambda request: (status, body)


def test_requests_hold_so_many_rows_and_nothing_else(server):
    stand_in = server()
    scores = ask(stand_in.url)
    assert scores.tolist() == LENGTHS and scores.dtype == torch.float32
    assert stand_in.requests == [
        {"prompts": ["p0", "p1"], "responses": ["a", "bb"], "finished": [False, True]},
        {"prompts": ["p2", "p3"], "responses": ["ccc", "dd"], "finished": [True, True]},
        {"prompts": ["p4"], "responses": ["e"], "finished": [True]},
    ]


def test_conversations_are_sent_beside_the_prompts(server):
    turns = [{"role": "user", "content": "q"}]
    rows = [replace(TEXTS.rows[0], prompt=None, messages=turns), *TEXTS.rows[1:]]
    stand_in = server()
    texts = ResponseTexts(TEXTS.prompts, TEXTS.responses, rows, TEXTS.finished)
    UrlScores(UrlSettings(stand_in.url, 2, 5.0, 2.0, False))(ROLLOUT, texts)
    assert stand_in.requests[0]["messages"] == [turns, None] and "messages" not in stand_in.requests[1]


WRONG = {
    "wrong length": (b'{"scores": [1.0]}', "answers 1 scores for 2 responses"),
    "too large": (b'{"scores": [1, 1%s]}' % (b"0" * 400), "score 1 of its answer is 1000"),
    "truth": (b'{"scores": [true, 1]}', "score 0 of its answer is True"),
    "no JSON": (b"<html>busy</html>", "its answer is not JSON: '<html>busy</html>'"),
    "a list": (b"[1, 2]", 'no list "scores"'),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_asked_for_again_and_then_stops_the_run(name, server, caplog):
    body, words = WRONG[name]
    assert ask(server(answering(200, body), answering(200, body), by_length).url).tolist() == LENGTHS
    assert "The request is repeated" in caplog.text
    stand_in = server(answering(200, body))
    with pytest.raises(UserError) as caught:
        ask(stand_in.url)
    message = str(caught.value)
    assert message.startswith(f"--reward_url {stand_in.url}: ") and words in message and "docs/rewards.md" in message
    assert "The request was sent 3 times" in message and len(stand_in.requests) == 3


@pytest.mark.parametrize("status", [500, 429])
def test_a_server_in_trouble_is_asked_until_it_is_well(status, server):
    trouble = answering(status, b"loading the model")
    assert ask(server(*[trouble] * 6, by_length).url).tolist() == LENGTHS


def test_a_server_that_stays_away(server):
    stand_in = server()
    stand_in.stop()
    words = f"--reward_url {stand_in.url}: no answer.*--resume_from_checkpoint.*--reward_patience"
    with pytest.raises(UserError, match=words):
        ask(stand_in.url, patience=0.2)


def test_requests_of_a_rollout_end_before_other_processes_stop_waiting(server):
    """The first of two requests takes longer than both may."""

    def late(request):
        time.sleep(0.5)
        return by_length(request)

    settings = UrlSettings(server(late).url, 2, 5.0, 2.0, False, 0.2)
    with pytest.raises(UserError, match=r"not all answered within 0.2 s.*raise --reward_batch or --ddp_timeout"):
        UrlScores(settings)(ROLLOUT, TEXTS)
    skipped = UrlScores(replace(settings, skips=True, longest=0.9))(ROLLOUT, TEXTS)
    assert skipped.isnan().sum() == len(TEXTS.responses) - 2, "the second request was not waited for to its end"


def test_rows_without_an_answer_are_left_out_if_asked_for(server, caplog):
    """The request of rows 2 and 3 fails; a number that is not finite is that row's alone."""
    trouble = answering(500, b"out of memory")
    null = answering(200, b'{"scores": [null]}')
    scores = ask(server(by_length, trouble, null).url, patience=0.0, skips=True)
    assert scores[:2].tolist() == [1, 2] and torch.isnan(scores[2:]).all()
    assert "500: out of memory" in caplog.text and "2 responses have no score" in caplog.text


def test_a_signal_stops_the_wait(server, monkeypatch):
    over = threading.Event()

    def slow(request):
        over.wait(60)
        return by_length(request)

    url = server(slow).url
    threading.Timer(0.3, lambda: monkeypatch.setattr(stop, "_received", 15)).start()
    begun = time.monotonic()
    with pytest.raises(Stopped):
        ask(url, timeout=60.0, patience=60.0)
    assert time.monotonic() - begun < 30
    over.set()


def test_a_slow_server(server):
    def slow(request):
        time.sleep(0.5)
        return by_length(request)

    found = ask(server(slow, by_length).url, timeout=0.2, patience=60.0)  # the second time it is not
    assert found.tolist() == LENGTHS
    with pytest.raises(UserError, match=r"no answer within 0.1 s \(--reward_timeout\).*lower --reward_batch or raise"):
        ask(server(slow).url, timeout=0.1, patience=0.2)
