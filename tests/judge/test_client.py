# SPDX-License-Identifier: Apache-2.0
"""Servers that fail, refuse, or take other forms of a request; and how often they are asked."""

import json

import pytest

from dschat.base import chat_servers
from dschat.base.chat_servers import Endpoint, Unanswered
from dschat.base.errors import UserError
from dschat.base.progress import RepeatedLines
from dschat.judge.published_rubrics import RUBRICS, answer_schema
from dschat.judge.questions import Form, TextRefused
from fake_judge import KEY, client_of, judge_server, question

OOPS = (500, {"error": {"message": "oops"}}, {})
# Ways to fail that pass → how many tokens each costs: one per four bytes of the request, and the longest answer.
FREE = {"429": (429, {"error": {"message": "slow down"}}, {}), "500": OOPS}
LOST = {
    "504": (504, "<html>gateway timeout</html>", {"Content-Type": "text/html"}),
    "choices without a message": (200, {"choices": [{}]}, {}),
    "timeout": "timeout",
    "broken off": "broken off",
}


def endpoint_of(tries):
    """A server that is asked so often, on this machine."""
    return Endpoint("m", "http://127.0.0.1:8000/v1", 1, 1.0, tries)


@pytest.mark.parametrize("failure", FREE | LOST)
def test_what_passes_is_tried_again_and_only_lost_answers_cost(server, tmp_path, failure):
    """The answer that comes is 100 + 10 tokens; each of two lost ones may have had 50."""
    server.plan.extend([(FREE | LOST)[failure]] * 2)
    client = client_of(server, tmp_path, timeout=1.0 if failure == "timeout" else 60.0)
    assert json.loads(client.ask(question()).text)["verdict"] == "first"
    assert len(server.bodies) == 3 and server.bodies[0] == server.bodies[2]
    spending, lost = client._spending, 2 if failure in LOST else 0
    assert (spending.requests, spending.lost, spending.output_tokens) == (1, lost, 10 + lost * 50)
    assert spending.input_tokens == 100 + lost * -(-server.sizes[0] // 4)


def test_what_was_never_sent_costs_nothing(tmp_path):
    with judge_server() as server:
        pass  # its port is free again
    client = client_of(server, tmp_path, tries=2)
    with pytest.raises(Unanswered, match=f"no answer with --max_tries 2: {server.url} gives no answer: .*refused"):
        client.ask(question())
    assert (client._spending.lost, client._spending.input_tokens) == (0, 0)


def test_waits_between_tries_grow_up_to_a_limit(monkeypatch):
    """Half a second, doubled at each try, but 3.75 s where the server asks for 3; the jitter is at its most."""
    monkeypatch.setattr(chat_servers, "FIRST_DELAY", 0.5)
    monkeypatch.setattr(chat_servers.random, "uniform", lambda low, high: high)
    waits = []
    errors = iter([Unanswered("a", retry_after=0.001), Unanswered("b", retry_after=3.0), *[Unanswered("c")] * 5])

    def send():
        raise next(errors)

    with pytest.raises(Unanswered, match="c"):
        chat_servers.with_retries(send, endpoint_of(7), waits.append)
    assert waits == [0.5, 3.75, 2.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/v1", "an address such as"),
        ("http://[::1/v1", "Invalid IPv6"),
        (
            "https://me.openai.azure.com/openai/deployments/gpt?api-version=1",
            "https://RESOURCE.*/openai/v1, without api",
        ),
        ("http://host/v1#secret", "a query or a fragment"),
        ("me:secret@host/v1", "holds a password"),
    ],
)
def test_bad_addresses(url, message):
    with pytest.raises(UserError, match=message) as error:
        chat_servers.checked_address(url, "--url")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("key", "shown"), [("word123", "bad key word123"), ("word1234", "bad key [key]")])
def test_a_key_of_eight_characters_is_hidden(key, shown):
    """A shorter one may be a part of ordinary words."""
    endpoint = Endpoint("m", "http://host/v1", 1, 1.0, 1, key=key)
    assert endpoint.hide_key(f"bad key {key}") == shown and key not in repr(endpoint)


def test_a_pause_that_is_not_waited_for_is_said_and_not_called_a_number_of_tries():
    """120 s are waited for, 121 are not."""
    waits = []

    def send():
        raise Unanswered("busy", retry_after=120.0 if not waits else 121.0)

    with pytest.raises(Unanswered) as error:
        chat_servers.with_retries(send, endpoint_of(8), waits.append)
    assert len(waits) == 1 and 120 <= waits[0] <= 150
    assert str(error.value) == (
        "busy: it asks for a pause of 121 s, longer than the 120 s that are waited for; go on after it"
    )


def test_retries_are_logged_once_with_their_count(server, tmp_path, caplog, monkeypatch):
    """Not for each request and thread: the first, and the tenth. Numbers in a message make no other line."""
    caplog.set_level("INFO")
    monkeypatch.setattr(chat_servers, "retries", RepeatedLines(chat_servers.logger.info))
    monkeypatch.setattr(chat_servers, "LONGEST_DELAY", 0.01)
    for number in range(12):
        server.plan.append((429, {"error": {"message": f"try again in {number}.5s, request req_{number}ab"}}, {}))
    client_of(server, tmp_path, tries=13).ask(question())
    first, tenth = [record.message for record in caplog.records if "The request is repeated" in record.message]
    assert first.endswith("try again in 0.5s, request req_0ab. The request is repeated (--max_tries 13).")
    assert tenth.endswith(
        "try again in 9.5s, request req_9ab. The request is repeated (--max_tries 13). (10 times so far)"
    )


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "", "refuses the key"),
        (429, "insufficient_quota", "out of money"),
        (403, "", "does not allow the use of gpt-test"),
        (404, "", "--judge_model and --base_url"),
    ],
)
def test_what_does_not_pass_ends_the_run(server, tmp_path, status, code, words):
    server.plan.extend([(status, {"error": {"message": f"no: {KEY} will not do", "code": code}}, {})] * 8)
    with pytest.raises(UserError, match=words) as error:
        client_of(server, tmp_path).ask(question())
    assert len(server.bodies) == 1
    assert KEY not in str(error.value)


def test_texts_do_not_follow_a_redirect(server, tmp_path):
    elsewhere = "http://127.0.0.1:9/v1/chat/completions"
    server.plan.append((307, {}, {"Location": elsewhere}))
    with pytest.raises(UserError, match=f"{server.url} answers 307: {elsewhere}"):
        client_of(server, tmp_path).ask(question())
    assert len(server.bodies) == 1


def formats(server):
    return [body.get("response_format", {}).get("type") for body in server.bodies]


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


def test_models_with_other_fields(server, tmp_path, caplog):
    def refuse(body):
        if "max_tokens" in body:
            return "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        return "'temperature' does not support 0" if "temperature" in body else None

    server.refuse_when(refuse)
    client_of(server, tmp_path).ask(question())
    body = server.bodies[-1]
    assert len(server.bodies) == 3 and "takes no temperature 0" in caplog.text
    assert body["max_completion_tokens"] == 50 and formats(server)[-1] == "json_schema"
    assert not {"max_tokens", "temperature"} & set(body)
    assert Form(structure="").after("something else") is None, "forms end"


@pytest.mark.parametrize("refusal", ["No system prompt", "Conversation roles must alternate user/assistant/user"])
def test_models_without_a_system_role_read_the_instructions_in_the_users_message(server, tmp_path, refusal):
    """Found out once."""
    server.refuse_when(lambda body: refusal if body["messages"][0]["role"] == "system" else None)
    server.answer = lambda messages: '{"verdict": "first"}' if len(messages) == 1 else "?"
    client = client_of(server, tmp_path)
    client.ask(question())
    (message,) = server.bodies[-1]["messages"]
    instructions, shown = question().messages
    assert message == {"role": "user", "content": f"{instructions['content']}\n\n{shown['content']}"}
    client.ask(question("other"))
    assert len(server.bodies) == 3


def test_requests_that_no_form_saves_end_the_run_in_the_servers_words(server, tmp_path):
    """Each of five questions is asked in three forms."""
    server.fail_on("", (422, {"detail": [{"msg": "field required"}]}, {}))
    client = client_of(server, tmp_path)
    for _ in range(4):
        with pytest.raises(TextRefused):
            client.ask(question())
    with pytest.raises(UserError, match="field required"):
        client.ask(question())
    assert len(server.bodies) == 15 and client.stop.is_set()


def test_an_answer_is_asked_for_once(server, tmp_path):
    """By a later run in the same folder, too; another length or text is another question."""
    first = client_of(server, tmp_path).ask(question())
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("gpt-test", 0, 50)
    form = {"name": "verdict", "strict": True, "schema": answer_schema(RUBRICS["summarize"])}
    assert body["response_format"]["json_schema"] == form and server.keys == [f"Bearer {KEY}"]
    again = client_of(server, tmp_path)
    assert again.ask(question()) == first
    assert (again.cached, again._spending.requests, len(server.bodies)) == (1, 0, 1)
    client_of(server, tmp_path, max_tokens=51).ask(question())
    again.ask(question(prompt="q"))
    assert len(server.bodies) == 3


def test_a_cache_that_cannot_be_written(server, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="--cache .*cache: cannot be written"):
        client_of(server, tmp_path)


def test_five_failures_in_a_row_end_the_run(server, tmp_path):
    """An answer between them starts the count anew."""
    client = client_of(server, tmp_path, tries=2)
    server.fail_on("POISON", OOPS)

    def fail(count):
        for number in range(count):
            with pytest.raises(Unanswered, match="no answer with --max_tries 2"):
                client.ask(question(f"POISON {number}"))

    fail(4)
    client.ask(question("fine"))
    fail(4)
    assert len(server.bodies) == 2 * 8 + 1 and not client.stop.is_set()
    with pytest.raises(UserError, match="no answer with --max_tries 2: .*5 questions in a row got no answer"):
        client.ask(question("POISON"))
    assert client.stop.is_set()
