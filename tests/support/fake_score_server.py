# SPDX-License-Identifier: Apache-2.0
"""HTTP servers on loopback, which stand in for other programs; and one of them: a reward server (`--reward_url`) with
scripted answers, failures and restarts.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes]


class Handler(BaseHTTPRequestHandler):
    """Reads whole requests, sends whole answers, and logs nothing."""

    def body(self) -> bytes:
        """What came with the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Sends an answer."""
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class Server:
    """Serves from now on, on a port that is free unless one is given."""

    def __init__(self, handler: type[Handler], port: int = 0) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Closes the port."""
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def served(handler: type[Handler]) -> Iterator[str]:
    """The address of a server that ends with the block."""
    server = Server(handler)
    try:
        yield server.url
    finally:
        server.stop()


def by_length(request: dict[str, Any]) -> Answer:
    """The length of each response."""
    return 200, json.dumps({"scores": [float(len(text)) for text in request["responses"]]}).encode()


class StandIn(Server):
    """Answers a request as the first of `answers` says, later ones as the next does; the last one is not used up."""

    def __init__(self, *answers: Callable[[dict[str, Any]], Answer], port: int = 0) -> None:
        self.answers, self.requests = list(answers or [by_length]), list[dict[str, Any]]()
        super().__init__(self._handler(), port)
        self.url += "/score"

    def _handler(self) -> type[Handler]:
        stand_in = self

        class Scores(Handler):
            def do_POST(self) -> None:
                request = json.loads(self.body())
                stand_in.requests.append(request)
                answer = stand_in.answers.pop(0) if len(stand_in.answers) > 1 else stand_in.answers[0]
                self.send(*answer(request))

        return Scores
