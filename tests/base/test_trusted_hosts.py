# SPDX-License-Identifier: Apache-2.0
"""A server that listens on this machine alone answers to its names alone, also behind a stranger's name."""

import asyncio
import threading
import time

import httpx2
import pytest

from dschat.base.trusted_hosts import is_trusted
from dschat.base.web_page import import_gradio, launch
from dschat.scoring.serve import ScoreServer, application
from dschat.vllm.gate import Gate

NAMES = ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "127.1.2.3"]
STRANGERS = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0", "[::2]", ""]


def request_at(address, *hosts, kind="http"):
    """What an ASGI server says of a request that it received at an address."""
    headers = [(b"host", host.encode("latin-1")) for host in hosts]
    return {"type": kind, "server": address, "path": "/x", "method": "POST", "headers": headers, "query_string": b""}


@pytest.mark.parametrize(
    ("address", "port", "kind"),
    [(("127.0.0.1", 80), "", "http"), (("::1", 80), ":8500", "http"), (("127.0.1.1", 80), ":8500", "websocket")],
)
def test_names_of_this_machine(address, port, kind):
    for name in NAMES:
        assert is_trusted(request_at(address, name + port, kind=kind))
    for stranger in [*STRANGERS, "evil@evil.example", "[::1", "\xff"]:
        assert not is_trusted(request_at(address, stranger + port, kind=kind))


def test_every_host_header_counts():
    """A browser sends one; HTTP/1.0 needs none."""
    here = ("127.0.0.1", 80)
    assert is_trusted(request_at(here))
    assert not is_trusted(request_at(here, "localhost", "evil.example"))


def test_what_listens_for_other_machines_has_names_that_nobody_knows():
    """It needs a token. So does what is given by name, and answers to it."""
    assert is_trusted(request_at(("10.0.0.5", 80), "gpu-1"))
    assert is_trusted(request_at(None, "gpu-1"))  # a Unix socket
    assert is_trusted({"type": "lifespan"})
    assert is_trusted(request_at(("127.0.1.1", 80), "GPU-1:80"), named="gpu-1")
    assert not is_trusted(request_at(("127.0.1.1", 80), "gpu-2:80"), named="gpu-1")


def statuses(url, *hosts):
    with httpx2.Client(trust_env=False) as client:
        return [client.get(url, headers={"Host": host}).status_code for host in hosts]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_of_scores(host):
    server = ScoreServer(host, 0, application(lambda request: {"scores": []}, "m"))
    thread = threading.Thread(target=server.answer)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        assert statuses(server.url, *NAMES) == [200] * len(NAMES)
        assert statuses(server.url, *STRANGERS) == [400] * len(STRANGERS)
        assert "127.0.0.1" in httpx2.get(server.url, headers={"Host": "evil.example"}).json()["error"]
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_vllm_server(token, monkeypatch):
    """With a token, no stranger's page gets past it."""
    monkeypatch.setenv("VLLM_API_KEY", token)
    answers = []

    async def behind(scope, receive, send):
        answers.append("vLLM")

    async def send(message):
        answers.append(message.get("status"))

    async def receive():
        return {}

    for host in ("localhost:8000", "evil.example:8000"):
        answers.clear()
        asyncio.run(Gate(behind)(request_at(("127.0.0.1", 8000), host), receive, send))
        assert answers[0] == (401 if token else "vLLM" if "localhost" in host else 400)


def test_a_page_starts_beside_a_socks_proxy_and_answers_to_its_names(monkeypatch):
    for name in ("ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    gr = import_gradio("--web")
    with gr.Blocks() as page:
        gr.Markdown("hello")
    url = launch(page, css="")
    try:
        assert statuses(url, "localhost", "evil.example") == [200, 400]
    finally:
        page.close(verbose=False)
