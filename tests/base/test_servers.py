# SPDX-License-Identifier: Apache-2.0
"""Which servers are on this machine, and through which proxy any server is reached."""

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dschat.base.chat_servers import Endpoint, complete, open_chat
from dschat.base.errors import UserError
from dschat.base.servers import is_local, is_loopback, open_async_client, open_client
from dschat.scoring.url import UrlScores, UrlSettings
from dschat.vllm.client import ServerClient, is_healthy

ELSEWHERE = "http://scores.invalid:8500"  # a name that no server of names knows


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def proxy():
    """A server, or proxy, that keeps the addresses that it is asked for, and answers each as a chat completion."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server.asked.append(self.path)
            body = json.dumps({"choices": [{"message": {"content": "hello"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["127.0.0.1", "2130706433", "[::1]", "::ffff:127.0.0.1", "LOCALHOST."], True),
        (["", "0.0.0.0", "10.0.0.1", "::2", "localhost.example.org", "é" * 99], False),
    ],
)
def test_loopback_in_every_spelling(hosts, expected):
    assert {is_loopback(host) for host in hosts} == {expected}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://[::1]:80/v1", True),
        ("http://0.0.0.0:8000/v1", True),  # what a server prints that listens on all addresses
        ("https://api.openai.com/v1", False),
        ("/v1", False),
    ],
)
def test_servers_on_this_machine(url, expected):
    assert is_local(url) is expected


def ask_every_server(url):
    """Asks a server as each part of the package does."""
    scores = UrlScores(UrlSettings(f"{url}/score", 1, 5.0, 0.0, skips=False))
    scores._client.post(f"{url}/score", content="a text")
    endpoint = Endpoint("m", f"{url}/v1", 10, 5.0, 1, "key")
    assert complete(open_chat(endpoint), endpoint, {"messages": []}).reply.text == "hello"
    assert asyncio.run(is_healthy(url))
    with pytest.raises(UserError, match="takes no weights of a run"):
        ServerClient([url]).info(url)

    async def generate():
        async with open_async_client(url, "--vllm_url", 5.0) as http:
            await http.post(f"{url}/generate", content="a text")

    asyncio.run(generate())


PATHS = ["/score", "/v1/chat/completions", "/health", "/run", "/generate"]


@pytest.mark.parametrize("proxy_url", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_a_server_on_this_machine_is_reached_without_a_proxy(proxy_url, proxy, monkeypatch):
    """Whatever the proxy is: a dead one would fail, and a SOCKS proxy would need a package."""
    monkeypatch.setenv("http_proxy", proxy_url)
    monkeypatch.setenv("ALL_PROXY", proxy_url)
    ask_every_server(proxy.url)
    ask_every_server(proxy.url.replace("127.0.0.1", "localhost"))
    assert proxy.asked == PATHS * 2


@pytest.mark.parametrize(("variable", "scheme"), [("http_proxy", "http://"), ("HTTP_PROXY", ""), ("ALL_PROXY", "")])
def test_another_server_is_reached_through_the_proxy(variable, scheme, proxy, monkeypatch):
    monkeypatch.setenv(variable, proxy.url.replace("http://", scheme))
    ask_every_server(ELSEWHERE)
    assert proxy.asked == [ELSEWHERE + path for path in PATHS]


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_direct"),
    [
        ("other.example, a.example", "http://a.example", True),
        (".example", "http://a.example", True),
        ("10.0.0.0/8", "http://11.1.2.3:8000/v1", False),
        ("fd00::/8", "http://[fd00::5]:8000/v1", True),
        ("", "http://a.example", False),
    ],
)
def test_no_proxy(no_proxy, url, is_direct, monkeypatch):
    """As curl reads it. A SOCKS proxy, which cannot be used here, shows whether a client would take it."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)
    if is_direct:
        open_client(url, "--url", 1.0).close()
        return
    with pytest.raises(UserError, match="--url .*: the proxy of ALL_PROXY is a SOCKS proxy.* pip install socksio"):
        open_client(url, "--url", 1.0)


def test_the_variable_of_the_scheme_comes_first(proxy, monkeypatch):
    """Desktops set both; only the one in use must be one that can be used."""
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    open_client(ELSEWHERE, "--url", 5.0).get(f"{ELSEWHERE}/score")
    assert proxy.asked == [f"{ELSEWHERE}/score"]
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(UserError, match="ALL_PROXY is a SOCKS proxy"):
        open_client(ELSEWHERE.replace("http", "https"), "--url", 5.0)


@pytest.mark.parametrize("bad", ["socks4://me:secret@host:1", "http://secret:port"])
def test_a_proxy_that_is_none_is_named_by_its_variable_alone(bad, monkeypatch):
    monkeypatch.setenv("https_proxy", bad)
    with pytest.raises(
        UserError, match="the proxy of HTTPS_PROXY is not an address .*add a.example to NO_PROXY"
    ) as error:
        open_client("https://a.example/v1", "--url", 1.0)
    assert "secret" not in str(error.value)
    monkeypatch.setenv("NO_PROXY", "a.example")
    open_client("https://a.example/v1", "--url", 1.0).close()


def test_redirects_are_not_followed():
    """A server may not send texts on to a host that nobody named."""
    assert open_client("http://a.example", "--url", 1.0).follow_redirects is False
    assert open_async_client("http://a.example", "--url", 1.0).follow_redirects is False
