# SPDX-License-Identifier: Apache-2.0
"""The server of a reward model: the numbers of the model itself, and requests that it cannot read."""

import json
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
from closeness import EPS, FORWARD, assert_near, near
from dialogue_cases import chat_tokenizer
from dschat.base.errors import UserError
from dschat.data.rows import Row
from dschat.models.scalar import ScalarModel
from dschat.scoring import serve
from dschat.scoring.reward_model import RewardModelScores, TextRewardScores
from dschat.scoring.reward_reader import load_reward_model, load_reward_tokenizer
from dschat.scoring.serve import BadRequest, Scorer, ScoreRequest, ScoreServer, application
from dschat.scoring.source import ResponseTexts
from dschat.scoring.url import UrlScores, UrlSettings
from factories import BOS, EOS, hf_score, make_classifier, make_prompt, make_rollout, save_folder

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
    rows = [([BOS, *encode(p, add_special_tokens=False)], encode(r, add_special_tokens=False))
            for p, r in zip(PROMPTS, RESPONSES, strict=True)]  # fmt: skip
    rows[0][1].append(EOS)
    rollout = make_rollout(rows)
    texts = replace(texts_of(), finished=rollout.finished.tolist())
    served = ask(serving(folder), rollout, texts)
    model = make_classifier(vocab_size=len(bytes_tokenizer))
    assert_near(served, RewardModelScores(ScalarModel(model), 2)(rollout, texts))
    assert served.tolist() == near([hf_score(model, p + r) for p, r in rows])
    reader = load_reward_model(folder, bytes_tokenizer, False, torch.device("cpu"), torch.float32)
    assert_near(served, TextRewardScores(reader)(rollout, texts))


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
    """GPT-2 has a table of 128 positions: stop, or leave that row out; a server says which has no score, and why."""
    path = save_folder(tmp_path, make_classifier("gpt2", vocab_size=len(bytes_tokenizer)), bytes_tokenizer)
    reader = load_reward_model(path, bytes_tokenizer, False, torch.device("cpu"), torch.float32)
    rollout, texts = make_rollout([([5], [6]), ([5], [6])]), texts_of(responses=(" short", " long" * 40))
    with pytest.raises(UserError, match=r"reads at most 128 tokens, but prompt and response of prompts.jsonl:2 have"):
        TextRewardScores(reader)(rollout, texts)
    scores = TextRewardScores(reader, skips=True)(rollout, texts)
    assert torch.isfinite(scores[0]) and torch.isnan(scores[1]) and "reads at most 128" in caplog.text
    url = serving(path)
    monkeypatch.setattr("dschat.scoring.url.FIRST_WAIT", 0.01)
    with pytest.raises(UserError, match=r"score 1 of its answer is None, not a finite number \(.*at most 128 tokens"):
        ask(url, rollout, texts, batch=2)
    caplog.clear()
    assert ask(url, rollout, texts, batch=2, skips=True).tolist() == pytest.approx(
        scores.tolist(), abs=FORWARD * EPS, nan_ok=True
    )
    assert "1 of 2 responses have no score (--reward_model" in caplog.text and "at most 128 tokens" in caplog.text


def test_a_conversation_that_the_template_refuses_costs_no_other(tmp_path, serving):
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + (
        tokenizer.chat_template
    )
    url = serving(save_folder(tmp_path, make_classifier(vocab_size=len(tokenizer)), tokenizer), rm_template=True)
    turns = [[{"role": role, "content": "What?"}] for role in ("user", "system", "user")]
    body = {"prompts": ["p"] * 3, "responses": ["one", "two", "three"], "messages": turns}
    answer = httpx2.post(url, json=body).json()
    alone = [httpx2.post(url, json={n: x[k : k + 1] for n, x in body.items()}).json()["scores"][0] for k in (0, 2)]
    assert answer["scores"] == [near(alone[0]), None, near(alone[1])]
    assert "refuses response 1: no system" in answer["error"]


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
    assert time.monotonic() - begun < 4, "five seconds of patience, of which none is used"
    monkeypatch.setattr(serve, "MAX_REQUEST_BYTES", 1000)
    answer = httpx2.post(url, content=b"x" * 1001)
    assert answer.status_code == 413 and "lower --reward_batch" in answer.json()["error"]


def test_long_texts_are_refused_unread_or_get_no_score(bytes_tokenizer, tmp_path, folder):
    """A limit of 100 tokens: 400,000 characters are not even encoded, 150 bytes are 150 tokens and more."""
    reader = load_reward_model(folder, bytes_tokenizer, False, torch.device("cpu"), torch.float32)
    scorer = Scorer(reader, 100)
    with pytest.raises(BadRequest, match=r"response 1 and its prompt have 400,001 characters.*--max_tokens") as found:
        scorer(ScoreRequest(["a", "a"], ["b", "b" * 400_000], [True] * 2, [None] * 2))
    assert found.value.status == 422
    turns = [{"role": "user", "content": "a" * 1600}]
    with pytest.raises(BadRequest, match=r"response 0 and its prompt have 1,6\d\d characters"):
        scorer(ScoreRequest(["a"], ["b"], [True], [turns]))
    answer = scorer(ScoreRequest(["a", "a"], ["b", "b" * 150], [True] * 2, [None] * 2))
    assert answer["scores"][1] is None and "reads at most 100 tokens" in str(answer["error"])
    assert math.isfinite(answer["scores"][0])


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


STUCK = """
import time
from dschat.scoring import serve
def stuck(request):
    print("asked", flush=True)
    time.sleep(60)
server = serve.ScoreServer("127.0.0.1", 0, serve.application(stuck, "m"))
print(server.url, flush=True)
server.answer()
"""


def test_a_second_signal_ends_it_though_the_model_is_busy(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    command = [warm_programs() / "python", tmp_path / "stuck.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    alarm = threading.Timer(60, process.kill)
    alarm.start()
    port = port_of(process.stdout.readline().strip())
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall((HEAD + BODY).encode())
        assert process.stdout.readline() == "asked\n"
        begun = time.monotonic()
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert process.wait(30) == 143 and time.monotonic() - begun < 10
    alarm.cancel()
    process.stdout.close()


def said_to(port, text):
    """What a server says to these first bytes of a request."""
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(text.encode())
        return connection.makefile("rb").read()


def port_of(url):
    return int(url.split(":")[2].split("/")[0])


BODY = json.dumps({"prompts": ["a"], "responses": ["b"]})
HEAD = f"POST / HTTP/1.0\r\nContent-Length: {len(BODY)}\r\n\r\n"
NOT_WHOLE = {"silent": "", "half a head": HEAD[:20]}


def test_the_end_waits_for_what_has_been_asked_and_for_no_silent_connection(serving):
    begun, go_on = threading.Event(), threading.Event()

    def slow(request):
        begun.set()
        go_on.wait(30)
        return {"scores": [1.0]}

    server = serving.app(application(slow, "m"), "0.0.0.0")
    answers = {}

    def say(name, text):
        answers[name] = said_to(port_of(server.url), text)

    threads = [threading.Thread(target=say, args=item) for item in {**NOT_WHOLE, "whole": HEAD + BODY}.items()]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    while len(server.server_state.connections) < len(threads):
        time.sleep(0.01)
    server.should_exit = True
    for thread in threads[:-1]:
        thread.join(10)
    assert answers == dict.fromkeys(NOT_WHOLE, b"")
    go_on.set()
    threads[-1].join(10)
    assert answers["whole"].endswith(b'{"scores": [1.0]}')


def test_a_model_that_fails_is_status_500(serving):
    def failing(request):
        raise IndexError("no such id")

    answer = httpx2.post(serving.app(application(failing, "m")).url, content=BODY)
    assert answer.status_code == 500 and answer.json() == {"error": "IndexError: no such id"}


def test_a_number_that_is_not_finite_is_null(bytes_tokenizer, tmp_path, serving):
    model = make_classifier(vocab_size=len(bytes_tokenizer))
    model.score.weight.data.fill_(float("inf"))
    answer = httpx2.post(
        serving(save_folder(tmp_path, model, bytes_tokenizer)), json=vars(ScoreRequest(["a"], ["b"], [True], [None]))
    )
    assert answer.json() == {"scores": [None], "error": "the score of response 0 is nan"}


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
    bad = subprocess.run([*command[:4], "--model", "/no/such"], capture_output=True, text=True, env=environment())
    assert bad.returncode == 2 and "error: --model /no/such: no such folder" in bad.stderr
