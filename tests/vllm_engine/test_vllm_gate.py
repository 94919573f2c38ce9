# SPDX-License-Identifier: Apache-2.0
"""Who may ask a vLLM server, and with which weights: the middleware alone, with nothing behind it."""

import asyncio
import json
import types

import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from dschat.vllm.client import is_version_of_run
from dschat.vllm.gate import MAX_BODY_BYTES, Gate

BEHIND = b"vLLM"


class Engine:
    """What the middleware asks of vLLM's engine."""

    errored = False

    def __init__(self, version: str) -> None:
        self.version = version
        self.calls = []

    async def collective_rpc(self, method, kwargs) -> None:
        self.calls.append((method, kwargs))

    async def get_weight_version(self) -> str:
        return self.version


async def behind(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": BEHIND})


def asked(path, monkeypatch, version="a.1", token="secret", kind="http", parts=(), engine=None, **headers):
    """Status of the answer to a request, or the code that closes a web socket; and whether vLLM got it."""
    monkeypatch.setenv("VLLM_API_KEY", token)
    raw = [(name.replace("_", "-").encode(), str(value).encode()) for name, value in headers.items()]
    app = types.SimpleNamespace(state=types.SimpleNamespace(engine_client=engine or Engine(version)))
    scope = {"type": kind, "method": "POST", "path": path, "headers": raw, "query_string": b"", "app": app}
    sent, waiting = [], list(parts)

    async def receive():
        body = waiting.pop(0) if waiting else b""
        return {"type": "http.request", "body": body, "more_body": bool(waiting)}

    async def send(message):
        sent.append(message)

    asyncio.run(Gate(behind)(scope, receive, send))
    return sent[0].get("status", sent[0].get("code")), any(message.get("body") == BEHIND for message in sent)


TRUSTED = {"authorization": "Bearer secret"}


@pytest.mark.parametrize("host", ["server", "server/health?"])
def test_a_host_header_does_not_open_the_door(host, monkeypatch) -> None:
    """Early versions of Starlette put it into the address as it is: http://server/health?/update_weights."""
    early = property(lambda request: URL(f"http://{request.headers.get('host', 'a')}{request.scope['path']}"))
    monkeypatch.setattr(Request, "url", early)
    assert asked("/update_weights", monkeypatch, host=host) == (401, False)
    assert asked("/v1/completions", monkeypatch, host=host, **TRUSTED) == (200, True)
    assert asked("/health", monkeypatch, host="server/update_weights?") == (200, True)


def test_the_token_guards_every_route_but_health(monkeypatch) -> None:
    for path in ("/run", "/inference/v1/generate", "/metrics", "/health/", "//health", "/Health"):
        assert asked(path, monkeypatch) == (401, False)
        assert asked(path, monkeypatch, authorization="Bearer other") == (401, False)
    assert asked("/v1/realtime", monkeypatch, kind="websocket", **TRUSTED) == (1008, False)


def test_bodies_have_a_length_and_a_limit(monkeypatch) -> None:
    assert asked("/v1/completions", monkeypatch, content_length=MAX_BODY_BYTES, **TRUSTED) == (200, True)
    assert asked("/v1/completions", monkeypatch, content_length=MAX_BODY_BYTES + 1, **TRUSTED) == (413, False)
    assert asked("/v1/completions", monkeypatch, transfer_encoding="chunked", **TRUSTED) == (413, False)
    for length in ("many", "-1", ""):
        assert asked("/v1/completions", monkeypatch, content_length=length, **TRUSTED) == (413, False)


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_weights_are_taken_of_the_version_under_way_alone(path, monkeypatch) -> None:
    def status(server, sent):
        return asked(path, monkeypatch, version=server, x_weight_version=sent, **TRUSTED)

    assert status("a.2.loading", "a.2") == (200, True)
    for server, sent in (("a.2.loading", "a.1"), ("b.2.loading", "a.2"), ("a.2", "a.2"), ("default", "a.2")):
        assert status(server, sent) == (409, False)
    assert asked(path, monkeypatch, version="a.2.loading", **TRUSTED) == (409, False)


def test_bytes_of_a_weight_go_to_the_workers_as_they_are(monkeypatch) -> None:
    """In whatever parts they arrive; those of another version go nowhere."""
    engine = Engine("a.2.loading")
    weight = {"name": "w", "dtype": "bfloat16", "shape": [1, 2]}
    sent = {"engine": engine, "parts": (b"\x00\xff", b"{}"), "x_weight": json.dumps(weight), **TRUSTED}
    assert asked("/update_weights", monkeypatch, x_weight_version="a.2", **sent) == (200, False)
    assert asked("/update_weights", monkeypatch, x_weight_version="a.1", **sent) == (409, False)
    update = {**weight, "version": "a.2", "data": b"\x00\xff{}"}
    assert engine.calls == [("update_weights", {"update_info": update})]


@pytest.mark.parametrize("weight", ["{", "[]", '{"name": "w"}'])
def test_a_weight_that_is_not_described_is_refused(weight, monkeypatch) -> None:
    headers = {"x_weight_version": "a.2", "x_weight": weight}
    assert asked("/update_weights", monkeypatch, version="a.2.loading", **headers, **TRUSTED) == (400, False)


def test_responses_are_drawn_with_the_wanted_version_alone(monkeypatch) -> None:
    generate = "/inference/v1/generate"
    assert asked(generate, monkeypatch, version="a.2", x_weight_version="a.2", **TRUSTED) == (200, True)
    assert asked(generate, monkeypatch, version="a.2.loading", x_weight_version="a.2", **TRUSTED) == (409, False)


def test_a_version_is_of_one_run() -> None:
    assert is_version_of_run("a.2", "a") and is_version_of_run("a.10", "a")
    for version, run in (("b.2", "a"), ("a.2", "ab"), ("ab.2", "a"), ("a", "a")):
        assert not is_version_of_run(version, run)
