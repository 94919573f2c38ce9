# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a reward server (`--reward_url`) on loopback, with scripted answers, failures and restarts."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, bytes]


def by_length(request: dict[str, Any]) -> Answer:
    """The length of each response."""
    return 200, json.dumps({"scores": [float(len(text)) for text in request["responses"]]}).encode()


class StandIn:
    """Answers a request as the first of `answers` says, later ones as the next does; the last one is not used up."""

    def __init__(self, *answers: Callable[[dict[str, Any]], Answer], port: int = 0) -> None:
        self.answers, self.requests = list(answers or [by_length]), list[dict[str, Any]]()
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/score"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes the port."""
        self._http.shutdown()
        self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.requests.append(request)
                answer = stand_in.answers.pop(0) if len(stand_in.answers) > 1 else stand_in.answers[0]
                status, body = answer(request)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
