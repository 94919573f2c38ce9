# SPDX-License-Identifier: Apache-2.0
"""Serves a reward model to --reward_url: `dschat serve --model FOLDER`. See docs/rewards.md."""

from __future__ import annotations

import json
import logging
import math
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

from dschat.cli import main
from dschat.config.commands import ServeOptions
from dschat.errors import UserError

if TYPE_CHECKING:
    from dschat.data.rows import Row
    from dschat.scoring.reward_reader import RewardReader

logger = logging.getLogger("dschat.scoring.serve")  # also where the module is __main__

T = TypeVar("T")
LARGEST_REQUEST = 32 << 20  # bytes


class BadRequest(Exception):
    """A request cannot be read; says why."""


@dataclass(frozen=True)
class Request:
    """What is asked: N prompts and responses, whether each response is complete, and conversations."""

    prompts: list[str]
    responses: list[str]
    finished: list[bool]
    messages: list[list[dict[str, object]] | None]

    @classmethod
    def read(cls, body: bytes) -> Request:
        """Of the JSON of a request. Raises BadRequest."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:  # the latter of lists in lists in lists
            raise BadRequest(f"the request is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise BadRequest("the request must be an object with prompts and responses")
        responses = _list_of(content, "responses", str)
        count = len(responses)
        prompts = _list_of(content, "prompts", str, count)
        finished = _list_of(content, "finished", bool, count) if "finished" in content else [True] * count
        messages = content.get("messages")
        if messages is None:
            messages = [None] * count
        if not isinstance(messages, list) or len(messages) != count or not all(map(_is_conversation, messages)):
            raise BadRequest(f"messages must be {count} lists of role and content, or null in their place")
        return cls(prompts, responses, finished, messages)


def _list_of(content: Mapping[str, object], name: str, kind: type[T], count: int | None = None) -> list[T]:
    values = content.get(name)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise BadRequest(f"{name} must be a list of {kind.__name__}")
    if count is not None and len(values) != count:
        raise BadRequest(f"there are {len(values)} {name} for {count} responses")
    return values


def _is_conversation(messages: object) -> bool:
    if messages is None:
        return True
    if not isinstance(messages, list) or not messages:
        return False
    names = ("role", "content")
    return all(isinstance(turn, dict) and all(isinstance(turn.get(n), str) for n in names) for turn in messages)


class Scorer:
    """A model that one request at a time may use."""

    def __init__(self, reader: RewardReader) -> None:
        self._reader, self._lock = reader, threading.Lock()

    def __call__(self, request: Request) -> dict[str, object]:
        """The answer: a number for each response, None where there is none, and why the first of these has none."""
        from dschat.data.rows import Row
        from dschat.scoring.reward_model import readable_rows
        from dschat.scoring.source import ResponseTexts

        rows = [
            Row(None if messages else prompt, messages, None, None, {}, f"response {n}")
            for n, (prompt, messages) in enumerate(zip(request.prompts, request.messages, strict=True))
        ]
        texts = ResponseTexts(request.prompts, request.responses, rows)
        with self._lock:
            readable = readable_rows(self._reader.tokenizer, texts)
            scores, problems = self._read(readable, request.responses, request.finished)
        for n, score in enumerate(scores):
            if not math.isfinite(score):
                problems.setdefault(n, f"the score of response {n} is {score}")
        answer: dict[str, object] = {"scores": [None if n in problems else x for n, x in enumerate(scores)]}
        return answer | ({"error": problems[min(problems)]} if problems else {})

    def _read(self, rows: list[Row], responses: list[str], finished: list[bool]) -> tuple[list[float], dict[int, str]]:
        """Numbers of texts, and what is wrong with some of them; each is read alone where one is refused."""
        try:
            scores, problems = self._reader.read(rows, responses, finished)
            return scores.tolist(), problems
        except UserError as error:
            if len(rows) == 1:
                return [math.nan], {0: str(error)}
        alone = [self._read([row], [text], [end]) for row, text, end in zip(rows, responses, finished, strict=True)]
        return [score for (score,), _ in alone], {n: found[0] for n, (_, found) in enumerate(alone) if found}


class Handler(BaseHTTPRequestHandler):
    """POST with texts, at any path, answers scores; GET at any path says that the server is well."""

    timeout = 60  # seconds that a connection may say nothing
    server: ScoreServer

    def do_GET(self) -> None:
        """Says which model answers."""
        self._send(HTTPStatus.OK, {"status": "ok", "model": self.server.model})

    def do_POST(self) -> None:
        """Scores texts."""
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if not 0 <= length <= LARGEST_REQUEST:
            self.close_connection = True
            problem = f"the length of the request is missing or more than {LARGEST_REQUEST >> 20} MB"
            self._send(HTTPStatus.BAD_REQUEST, {"error": problem})
            return
        try:
            body = self.rfile.read(length)
            if len(body) < length:  # the client has gone, or the server ends: no answer, so that it is asked again
                self.close_connection = True
                return
            self._send(HTTPStatus.OK, self.server.scorer(Request.read(body)))
        except BadRequest as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except OSError:
            self.close_connection = True  # the client has gone
        except (RuntimeError, ValueError, IndexError) as error:  # of the model: memory, ids that it does not know
            logger.exception("a request failed")
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

    def _send(self, status: HTTPStatus, content: Mapping[str, object]) -> None:
        body = json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client has gone

    def log_message(self, format: str, *args: object) -> None:
        """Not a line for each request; what goes wrong is logged."""


class ScoreServer(ThreadingHTTPServer):
    """Threads take requests; the model answers one after the other. At its end it waits for those under way."""

    daemon_threads = False

    def __init__(self, address: tuple[str, int], scorer: Scorer, model: str) -> None:
        """Takes where to listen and what answers; raises UserError where the port is taken."""
        self.scorer, self.model = scorer, model
        self._open: WeakSet[socket.socket] = WeakSet()  # the connections
        try:
            super().__init__(address, Handler)
        except OSError as error:
            raise UserError(f"--host {address[0]} --port {address[1]}: {error.strerror}. Give another.") from error

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        host = str(self.server_address[0])
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{self.server_port}/score"

    def get_request(self) -> tuple[socket.socket, object]:
        """The next connection, which is noted."""
        connection, address = super().get_request()
        self._open.add(connection)
        return connection, address

    def server_close(self) -> None:
        """Waits for the requests that have come; from here on a connection that says nothing has ended."""
        for connection in list(self._open):
            with suppress(OSError):  # it has been closed meanwhile
                connection.shutdown(socket.SHUT_RD)
        super().server_close()


def serve(options: ServeOptions) -> str:
    """Opens the model and answers until SIGTERM or Ctrl-C. Raises UserError."""
    import torch

    from dschat.models.opening import choose_dtype
    from dschat.scoring.reward_reader import ReaderFlags, load_reward_model, load_reward_tokenizer

    flags = ReaderFlags("--model", "--rm_template", "Send shorter texts")
    tokenizer = load_reward_tokenizer(options.model, options.rm_template, flags)
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"--device {options.device}: must be cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {options.device}: PyTorch finds no GPU here. Give --device cpu.")
    dtype = choose_dtype(options.dtype, device)
    reader = load_reward_model(options.model, tokenizer, options.rm_template, device, dtype, options.batch_size, flags)
    with ScoreServer((options.host, options.port), Scorer(reader), options.model) as server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        logger.info("scores of %s on %s (%s): --reward_url %s", options.model, device, dtype, server.url)
        server.serve_forever(poll_interval=0.1)
    return "stopped"


if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
