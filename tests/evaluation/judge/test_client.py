# SPDX-License-Identifier: Apache-2.0
"""Servers that fail, refuse, or take other forms of a request; and how often they are asked."""

import email.utils
import json
import threading

import pytest

from dschat.errors import UserError
from dschat.evaluation.judge.client import Unanswered
from dschat.evaluation.judge.forms import Form, other_form
from dschat.evaluation.judge.rubrics import RUBRICS, answer_schema
from dschat.evaluation.judge.server import Endpoint, ItemRefused
from judges import KEY, client_of, judge_server, question


@pytest.fixture
def server():
    with judge_server() as judge:
        yield judge


def too_often(seconds):
    return (429, {"error": {"message": "slow down"}}, {"Retry-After": str(seconds)})


FAILURES = {
    "429": too_often(0),
    "429 with a date": too_often(email.utils.formatdate(0)),
    "429 in milliseconds": (429, {"error": {"message": "slow down"}}, {"retry-after-ms": "3"}),
    "408": (408, {"error": {"message": "waited for you"}}, {}),
    "500": (500, {"error": {"message": "oops"}}, {}),
    "503 without JSON": (503, "<html>busy</html>", {"Content-Type": "text/html"}),
    "half a JSON": "half a JSON",
    "broken off": "broken off",
    "an error as a success": (200, {"error": {"message": "upstream"}}, {}),
    "a page": (200, "<html>log in</html>", {"Content-Type": "text/html"}),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_passes_is_tried_again(server, tmp_path, failure):
    server.plan.extend([FAILURES[failure]] * 2)
    client = client_of(server, tmp_path)
    assert json.loads(client.ask(question()).text)["verdict"] == "first"
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]
    assert client.spending.requests == 1
    if client.spending.lost == 0:
        assert (client.spending.input_tokens, client.spending.output_tokens) == (100, 10)


def test_a_timeout_is_tried_again(server, tmp_path):
    server.plan.append("timeout")
    client = client_of(server, tmp_path, timeout=0.3)
    assert client.ask(question()).model == "served"
    assert len(server.bodies) == 2


def test_tries_have_an_end(server, tmp_path):
    server.plan.extend([FAILURES["500"]] * 10)
    client = client_of(server, tmp_path, tries=3)
    with pytest.raises(UserError, match="no answer after 3 tries: .* answers 500: .*oops"):
        client.ask(question())
    assert len(server.bodies) == 3
    assert client.stop.is_set()


def test_nobody_there(tmp_path):
    with judge_server() as server:
        pass  # its port is free again
    with pytest.raises(UserError, match=f"no answer after 2 tries: no connection to {server.url}"):
        client_of(server, tmp_path, tries=2).ask(question())


class CountedWaits(threading.Event):
    """Says how long would have been waited, and does not."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        return False


def test_waits_double_unless_the_server_says_how_long(server, tmp_path):
    """Of each wait of 0.01 s · 2^k between the half and the whole is taken, by chance."""
    server.plan.extend([FAILURES["500"], FAILURES["500"], too_often(0.25), FAILURES["500"]])
    client = client_of(server, tmp_path)
    client.stop = CountedWaits()
    client.ask(question())
    first, second, asked_for, fourth = client.stop.waits
    assert 0.005 <= first <= 0.01 and 0.01 <= second <= 0.02 and 0.04 <= fourth <= 0.08
    assert asked_for == 0.25


def test_waits_stay_under_a_minute(server, tmp_path):
    server.plan.extend([FAILURES["500"]] * 39)
    client = client_of(server, tmp_path, tries=40)
    client.stop = CountedWaits()
    client.ask(question())
    assert len(client.stop.waits) == 39 and 30 <= client.stop.waits[-1] <= 60


def test_a_server_that_asks_for_hours_ends_the_run(server, tmp_path):
    server.plan.append(too_often(7200))
    with pytest.raises(UserError, match="asks to wait 7200 s"):
        client_of(server, tmp_path).ask(question())


ENDINGS = {
    401: "refuses the key",
    402: "out of money",
    403: "forbids the use of gpt-test",
    404: "--judge-model and --base-url",
    405: "answers 405",
}


@pytest.mark.parametrize("status", ENDINGS)
def test_what_does_not_pass_ends_the_run_at_once(server, tmp_path, status):
    server.plan.append((status, {"error": {"message": f"no: {KEY} will not do"}}, {}))
    with pytest.raises(UserError, match=ENDINGS[status]) as error:
        client_of(server, tmp_path).ask(question())
    assert len(server.bodies) == 1
    assert KEY not in str(error.value)


def test_an_empty_account_is_not_waited_for(server, tmp_path):
    server.plan.append((429, {"error": {"message": "quota", "code": "insufficient_quota"}}, {}))
    with pytest.raises(UserError, match="out of money"):
        client_of(server, tmp_path).ask(question())
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "error",
    [
        {"message": "no", "code": "context_length_exceeded"},
        {"message": "This model's maximum context length is 8 tokens."},
        {"message": "The response was filtered", "code": "content_filter"},
        {"message": "the request exceeds the available context size"},
        {"message": "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens"},
        {"message": "Invalid prompt: your prompt was flagged as potentially violating our usage policy."},
        {"message": "no", "code": "invalid_prompt"},
    ],
)
def test_a_text_that_the_server_refuses_is_no_end(server, tmp_path, error):
    server.plan.append((400, {"error": error}, {}))
    client = client_of(server, tmp_path)
    with pytest.raises(ItemRefused):
        client.ask(question())
    assert not client.stop.is_set()
    assert len(server.bodies) == 1
    client.ask(question("another"))


def formats(server):
    return [body.get("response_format", {}).get("type") for body in server.bodies]


def test_the_request(server, tmp_path):
    client_of(server, tmp_path).ask(question())
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("gpt-test", 0, 50)
    assert body["response_format"]["json_schema"]["strict"] is True
    assert body["response_format"]["json_schema"]["schema"] == answer_schema(RUBRICS["summarize"])
    assert server.keys == [f"Bearer {KEY}"]


def test_servers_without_structured_output(server, tmp_path):
    """First none of it, found out once; then a server that takes JSON without a schema, as gpt-4o-2024-05-13 does."""
    server.refuse_when(lambda body: "response_format is unknown" if "response_format" in body else None)
    client = client_of(server, tmp_path)
    client.ask(question())
    client.ask(question("other"))
    assert formats(server) == ["json_schema", "json_object", None, None]
    server.bodies.clear()
    server.refuse_when(lambda body: "no schema" if "json_schema" in str(body.get("response_format")) else None)
    client_of(server, tmp_path).ask(question("third"))
    assert formats(server) == ["json_schema", "json_object"]


def test_models_with_other_fields(server, tmp_path):
    def refuse(body):
        if "max_tokens" in body:
            return "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        return "'temperature' does not support 0" if "temperature" in body else None

    server.refuse_when(refuse)
    client_of(server, tmp_path).ask(question())
    body = server.bodies[-1]
    assert len(server.bodies) == 3
    assert body["max_completion_tokens"] == 50
    assert not {"max_tokens", "temperature"} & set(body)
    assert formats(server)[-1] == "json_schema"


def test_forms_end():
    assert other_form(Form(structure="", temperature=True), "something else") is None


def test_a_request_that_no_form_saves(server, tmp_path):
    server.refuse_when(lambda body: "the model is pinned")
    with pytest.raises(UserError, match="refuses the request .400.: .*the model is pinned"):
        client_of(server, tmp_path).ask(question())
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"detail": "Server is pinned to 'x'."}, "Server is pinned to 'x'"),
        ({"detail": [{"msg": "field required"}]}, "field required"),
        ({"object": "error", "message": "no such thing"}, "no such thing"),
        ("plain text", "plain text"),
        ("", "no reason given"),
    ],
)
def test_every_server_has_its_own_way_to_complain(server, tmp_path, body, words):
    server.plan.extend([(422, body, {})] * 3)
    with pytest.raises(UserError, match=words):
        client_of(server, tmp_path).ask(question())


def test_an_answer_is_asked_for_once(server, tmp_path):
    """By a later run in the same folder, too; another model, length or text is another question."""
    first = client_of(server, tmp_path).ask(question())
    again = client_of(server, tmp_path)
    assert again.ask(question()) == first
    assert (again.cached, again.spending.requests, len(server.bodies)) == (1, 0, 1)
    client_of(server, tmp_path, max_tokens=51).ask(question())
    again.ask(question("bad", "good"))
    again.ask(question(prompt="q"))
    assert len(server.bodies) == 4


def test_threads_with_the_same_question_share_the_answer(server, tmp_path):
    server.plan.append("slow")
    client = client_of(server, tmp_path)
    threads = [threading.Thread(target=client.ask, args=(question(),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.bodies) == 1
    assert client.cached == 5


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"text": "x"}', b"\xff"])
def test_a_spoilt_cache_file_is_asked_again(server, tmp_path, content):
    client_of(server, tmp_path).ask(question())
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_bytes(content)
    client_of(server, tmp_path).ask(question())
    assert len(server.bodies) == 2


def test_a_cache_that_cannot_be_written(server, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="--cache .*cache: cannot be written"):
        client_of(server, tmp_path)


def test_the_key_is_taken_out_of_answers(server, tmp_path):
    server.answer = lambda messages: f'{{"comparison": "{KEY}", "verdict": "tie"}}'
    reply = client_of(server, tmp_path).ask(question())
    assert reply.text == '{"comparison": "[key]", "verdict": "tie"}'
    assert KEY not in repr(Endpoint("m", "u", 1, 1.0, KEY))


def tokens_of(asked):
    """One per four characters of what is sent."""
    characters = sum(len(message["content"]) for message in asked.messages) + len(json.dumps(asked.schema))
    return -(-characters // 4)


@pytest.mark.parametrize("failure", ["timeout", "broken off", "half a JSON"])
def test_a_request_whose_answer_is_lost_counts_as_the_longest(server, tmp_path, failure):
    """The answer that comes is 100 + 10 tokens; each of two lost ones may have had 50."""
    server.plan.extend([failure] * 2)
    client = client_of(server, tmp_path, timeout=0.3)
    client.ask(question())
    spending = client.spending
    assert (spending.requests, spending.lost) == (1, 2)
    assert spending.input_tokens == 100 + 2 * tokens_of(question())
    assert spending.output_tokens == 10 + 2 * 50


@pytest.mark.parametrize("failure", ["429", "500", "503 without JSON"])
def test_what_a_server_refuses_costs_nothing(server, tmp_path, failure):
    server.plan.append(FAILURES[failure])
    client = client_of(server, tmp_path)
    client.ask(question())
    assert (client.spending.lost, client.spending.input_tokens, client.spending.output_tokens) == (0, 100, 10)


def test_what_was_never_sent_costs_nothing(tmp_path):
    with judge_server() as server:
        pass  # its port is free again
    client = client_of(server, tmp_path, tries=2)
    with pytest.raises(UserError, match="no connection"):
        client.ask(question())
    assert (client.spending.lost, client.spending.input_tokens) == (0, 0)


@pytest.mark.parametrize("status", [400, 422])
def test_after_an_answer_a_refusal_concerns_the_text(server, tmp_path, status):
    client = client_of(server, tmp_path)
    client.ask(question())
    server.plan.append((status, {"error": {"message": "rule 17"}}, {}))
    with pytest.raises(ItemRefused, match="rule 17"):
        client.ask(question("other"))
    assert len(server.bodies) == 2 and not client.stop.is_set()
    client.ask(question("third"))
    assert formats(server) == ["json_schema"] * 3


def test_after_an_answer_a_failure_concerns_the_text(server, tmp_path):
    """Only if the server answers another question after it: here the control, then nothing."""
    client = client_of(server, tmp_path, tries=2)
    client._control = question("control")
    server.fail_on("POISON", FAILURES["500"])
    with pytest.raises(Unanswered, match="no answer after 2 tries"):
        client.ask(question("POISON"))
    assert len(server.bodies) == 3 and not client.stop.is_set()
    server.fail_on("", FAILURES["500"])
    with pytest.raises(UserError, match="no answer after 2 tries"):
        client.ask(question("another"))
    assert client.stop.is_set()


def test_a_server_without_structured_output_that_rejects_the_first_text(server, tmp_path):
    """The harmless question finds the form; the text is asked about once more in it, and no other after that."""
    client = client_of(server, tmp_path)
    client._control = question("control")
    server.refuse_when(
        lambda body: "no" if "response_format" in body or "POISON" in json.dumps(body["messages"]) else None
    )
    with pytest.raises(ItemRefused):
        client.ask(question("POISON"))
    client.ask(question("fine"))
    assert formats(server) == [*("json_schema", "json_object", None) * 2, None, None]
