# SPDX-License-Identifier: Apache-2.0
"""The server of a reward model: the numbers of the model itself, and requests that it cannot read."""

import math
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace

import httpx2
import pytest
import torch

from cli_runs import environment, warm_programs
from closeness import near
from dialogue_cases import chat_tokenizer
from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.scoring import serve
from dschat.scoring.reward_reader import load_reward_model
from dschat.scoring.reward_tokenizer import load_reward_tokenizer
from dschat.scoring.serve import Scorer, ScoreRequest, ScoreServer, application
from dschat.scoring.source import ResponseTexts
from dschat.scoring.url import UrlScores, UrlSettings
from factories import EOS, hf_score, make_classifier, make_prompt, make_rollout, save_folder

PROMPTS, RESPONSES = ("a cat", "the quick brown fox"), (" sat on a mat", " jumps")


def texts_of(prompts=PROMPTS, responses=RESPONSES):
    rows = [make_prompt([], p, n).row for n, p in enumerate(prompts)]
    return ResponseTexts(list(prompts), list(responses), rows, [True] * len(rows))


@pytest.fixture
def folder(bytes_tokenizer, tmp_path):
    return save_folder(tmp_path / "rm", make_classifier(vocab_size=len(bytes_tokenizer)), bytes_tokenizer)


@pytest.fixture
def serving():
    """serving(path, rm_template): the address of a server in a thread."""
    running = []

    def start(path, rm_template=False):
        tokenizer = load_reward_tokenizer(path, rm_template)
        reader = load_reward_model(path, tokenizer, rm_template, torch.device("cpu"), torch.float32, 2)
        return started(application(Scorer(reader), path)).url

    def started(app, host="127.0.0.1"):
        server = ScoreServer(host, 0, app)
        thread = threading.Thread(target=server.answer)
        thread.start()
        running.append((server, thread))
        return server

    start.app = started
    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


def ask(url, rollout, texts, batch=1, skips=False):
    return UrlScores(UrlSettings(url, batch, 30.0, 5.0, skips))(rollout, texts)


def test_served_scores_are_those_of_the_ids_and_of_plain_transformers(folder, bytes_tokenizer, serving):
    """With a token for each byte a text has one way to be encoded. The first response has come to its end."""
    encode = bytes_tokenizer.encode
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        rows.append((encode(prompt), encode(response, add_special_tokens=False)))
    rows[0][1].append(EOS)
    rollout = make_rollout(rows)
    texts = replace(texts_of(), finished=rollout.finished.tolist())
    served = ask(serving(folder), rollout, texts)
    model = make_classifier(vocab_size=len(bytes_tokenizer))
    assert served.tolist() == near([hf_score(model, p + r) for p, r in rows])


def test_conversations_go_through_the_models_own_template(tmp_path, serving):
    tokenizer = chat_tokenizer("chatml")
    model = make_classifier(vocab_size=len(tokenizer))
    url = serving(save_folder(tmp_path, model, tokenizer), rm_template=True)
    turns = [{"role": "user", "content": "What?"}]
    row = Row(None, turns, None, None, {}, "chat.jsonl:1")
    texts = ResponseTexts(["<as the actor reads it>"], ["This."], [row], [True])
    (score,) = ask(url, make_rollout([([5], [6, EOS])]), texts).tolist()
    written = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nThis.<|im_end|>\n"
    assert score == near(hf_score(model, tokenizer.encode(written, add_special_tokens=False)))


def test_a_text_that_is_too_long(bytes_tokenizer, tmp_path, serving, caplog, monkeypatch):
    """GPT-2 has a table of 128 positions: a server says which response has no score, and why."""
    url = serving(save_folder(tmp_path, make_classifier("gpt2", vocab_size=len(bytes_tokenizer)), bytes_tokenizer))
    rollout, texts = make_rollout([([5], [6]), ([5], [6])]), texts_of(responses=(" short", " long" * 40))
    monkeypatch.setattr("dschat.scoring.url.FIRST_WAIT", 0.01)
    with pytest.raises(UserError, match=r"score 1 of its answer is None, not a finite number \(.*at most 128 tokens"):
        ask(url, rollout, texts, batch=2)
    caplog.clear()
    assert ask(url, rollout, texts, batch=2, skips=True).isnan().tolist() == [False, True]
    assert "1 of 2 responses have no score (--reward_model" in caplog.text and "at most 128 tokens" in caplog.text


BAD = {
    b"prompts=a": "Invalid JSON",
    b"[]": "the request: Input should be an object",
    b'{"prompts": ["a"]}': "responses: Field required",
    b'{"prompts": ["a"], "responses": [1]}': "responses.0: Input should be a valid string",
    b'{"prompts": [], "responses": ["a"]}': "0 prompts for 1 responses",
    b'{"prompts": ["a"], "responses": ["a"], "messages": [[{"role": "user"}]]}': "lists of role and content",
    b'{"prompts": ["a"], "responses": ["a"], "messages": [[]]}': "lists of role and content",
    rb'{"prompts": ["a"], "responses": ["\ud800"]}': "Invalid JSON",
}


def test_what_is_no_request_is_refused(folder, serving, monkeypatch):
    """A run does not repeat it. Half of a surrogate pair is no text; a whole pair is a character."""
    url = serving(folder)
    for body, words in BAD.items():
        answer = httpx2.post(url, content=body)
        assert answer.status_code == 422 and words in answer.json()["error"], body
    assert httpx2.get(url.replace("/score", "/health")).json() == {"status": "ok", "model": folder}
    assert httpx2.post(url, json={"prompts": [], "responses": []}).json() == {"scores": []}
    whole = httpx2.post(url, content=rb'{"prompts": ["a"], "responses": ["\ud83d\ude00"], "messages": null}')
    assert whole.status_code == 200 and math.isfinite(whole.json()["scores"][0])
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"it refuses the request, 422"):
        ask(url, make_rollout([([5], [6])]), texts_of(["a"], ["\ud800"]))
    assert time.monotonic() - begun < 4, "of five seconds of patience"
    monkeypatch.setattr(serve, "MAX_REQUEST_BYTES", 1000)
    answer = httpx2.post(url, content=b"x" * 1001)
    assert answer.status_code == 413 and "lower --reward_batch" in answer.json()["error"]


def test_the_token_guards_scores(serving, monkeypatch):
    url = serving.app(application(lambda request: {"scores": [1.0]}, "m", "secret")).url
    body = {"prompts": ["a"], "responses": ["b"]}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        refused = httpx2.post(url, json=body, headers=headers)
        assert refused.status_code == 401 and "REWARD_API_KEY" in refused.json()["error"]
    assert httpx2.post(url, json=body, headers={"Authorization": "Bearer secret"}).json() == {"scores": [1.0]}
    assert httpx2.get(url).json() == {"status": "ok"}, "its model is nobody else's business"
    rollout, texts = make_rollout([([5], [6])]), texts_of(["a"], ["b"])
    monkeypatch.delenv("REWARD_API_KEY", raising=False)
    with pytest.raises(UserError, match="it refuses the request, 401: .*REWARD_API_KEY"):
        ask(url, rollout, texts)
    monkeypatch.setenv("REWARD_API_KEY", "secret")
    assert ask(url, rollout, texts).tolist() == [1.0]


def port_of(url):
    return int(url.split(":")[2].split("/")[0])


def test_a_model_that_fails_is_status_500(serving):
    def failing(request):
        raise IndexError("no such id")

    answer = httpx2.post(serving.app(application(failing, "m")).url, json={"prompts": ["a"], "responses": ["b"]})
    assert answer.status_code == 500 and answer.json() == {"error": "IndexError: no such id"}


def test_a_request_whose_client_has_gone_is_not_computed(serving):
    """While the first is computed, the second's client stops waiting."""
    begun, may_end, scored = threading.Event(), threading.Event(), []

    def slow(request):
        scored.append(request.responses)
        begun.set()
        may_end.wait(30)
        return {"scores": [1.0]}

    url = serving.app(application(slow, "m")).url
    first = threading.Thread(target=httpx2.post, args=(url,), kwargs={"json": {"prompts": ["a"], "responses": ["1"]}})
    first.start()
    assert begun.wait(30)
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(url, json={"prompts": ["a"], "responses": ["2"]}, timeout=0.3)
    may_end.set()
    first.join()
    httpx2.post(url, json={"prompts": ["a"], "responses": ["3"]})
    assert scored == [["1"], ["3"]]


def test_a_number_that_is_not_finite_is_null(bytes_tokenizer, tmp_path):
    model = make_classifier(vocab_size=len(bytes_tokenizer))
    model.score.weight.data.fill_(float("inf"))
    path = save_folder(tmp_path, model, bytes_tokenizer)
    scorer = Scorer(load_reward_model(path, bytes_tokenizer, False, torch.device("cpu"), torch.float32))
    answer = scorer(ScoreRequest(["a"], ["b"], [True], [None]))
    assert answer == {"scores": [None], "error": "the score of response 0 is nan"}


def test_a_port_that_is_taken(folder, serving):
    port = port_of(serving(folder))
    with pytest.raises(UserError, match=f"--host 127.0.0.1 --port {port}: Address already in use"):
        ScoreServer("127.0.0.1", port, application(None, "m"))


def test_the_command_serves_and_ends_at_sigterm(folder):
    python = warm_programs() / "python"
    command = [python, "-m", "dschat", "serve", "--model", folder, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None
    alarm = threading.Timer(60, process.kill)  # it says nothing
    alarm.start()
    line = next(line for line in process.stderr if "--reward_url" in line)
    alarm.cancel()
    url = line.split("--reward_url ")[1].strip()
    assert len(httpx2.post(url, json={"prompts": ["a"], "responses": ["b"]}).json()["scores"]) == 1
    with socket.create_connection(("127.0.0.1", port_of(url))):  # which says nothing
        process.send_signal(signal.SIGTERM)
        assert "stopped" in process.stdout.read() and process.wait(50) == 0
