# SPDX-License-Identifier: Apache-2.0
"""Serves a reward model to --reward_url: `dschat serve --model FOLDER`. See docs/rewards.md."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import TYPE_CHECKING, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from dschat.cli import main
from dschat.config.commands import ServeOptions
from dschat.config.rewards import VERSION
from dschat.errors import UserError

if TYPE_CHECKING:
    from dschat.scoring.reward_reader import RewardReader
    from dschat.scoring.source import ResponseTexts

logger = logging.getLogger("dschat.scoring.serve")  # also where the module is __main__

T = TypeVar("T")
LARGEST_REQUEST = 32 << 20  # bytes
LARGEST_READING = 256 << 20  # characters of all responses up to the end of each of their macro actions
SILENCE = 60  # seconds that a connection may say nothing


class BadRequest(Exception):
    """A request cannot be read; says why."""


@dataclass(frozen=True)
class ScoreRequest:
    """What is asked: N prompts and responses, whether each response is complete, conversations, and, where there are
    to be numbers for them, the macro actions that each response consists of.
    """

    prompts: list[str]
    responses: list[str]
    finished: list[bool]
    messages: list[list[dict[str, object]] | None]
    segments: list[list[str]] | None = None
    # Of each conversation, further variables of the chat template, for instance `tools`.
    template_arguments: list[dict[str, object]] | None = None

    @classmethod
    def read(cls, body: bytes) -> ScoreRequest:
        """Of the JSON of a request. Raises BadRequest."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:  # the latter of lists in lists in lists
            raise BadRequest(f"the request is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise BadRequest("the request must be an object with prompts and responses")
        if content.get("version", VERSION) not in range(1, VERSION + 1):
            raise BadRequest(f"this server answers requests of version 1 to {VERSION}, not {content['version']}")
        responses = _list_of(content, "responses", str)
        count = len(responses)
        prompts = _list_of(content, "prompts", str, count)
        finished = _list_of(content, "finished", bool, count) if "finished" in content else [True] * count
        messages = content.get("messages")
        if messages is None:
            messages = [None] * count
        if not isinstance(messages, list) or len(messages) != count or not all(map(_is_conversation, messages)):
            raise BadRequest(f"messages must be {count} lists of role and content, or null in their place")
        segments = content.get("segments")
        if segments is not None and not _are_segments(segments, responses):
            raise BadRequest(f"segments must be {count} lists of texts, each of which make up the response")
        arguments = None
        if content.get("template_arguments") is not None:
            arguments = _list_of(content, "template_arguments", dict, count)
        return cls(prompts, responses, finished, messages, segments, arguments)


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
    return all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and (isinstance(turn.get("content"), str) or ("content" not in turn and "tool_calls" in turn))
        for turn in messages
    )


def _are_segments(segments: object, responses: list[str]) -> bool:
    if not isinstance(segments, list) or len(segments) != len(responses):
        return False
    texts = all(isinstance(own, list) and own and all(isinstance(text, str) for text in own) for own in segments)
    if not texts or list(map("".join, segments)) != responses:
        return False
    if sum(sum(accumulate(map(len, own))) for own in segments) > LARGEST_READING:
        most = f"{LARGEST_READING >> 20} million characters"
        raise BadRequest(f"all responses up to all of their segments are more than {most}: lower --reward_batch")
    return True


class Scorer:
    """A model that one request at a time may use."""

    def __init__(self, reader: RewardReader) -> None:
        self._reader, self._lock = reader, threading.Lock()

    def __call__(self, request: ScoreRequest) -> dict[str, object]:
        """The answer: a number for each response, None where there is none, and why the first of these has none."""
        from dschat.data.rows import Row
        from dschat.scoring.segments import Segments
        from dschat.scoring.source import ResponseTexts, prefix_texts

        arguments = request.template_arguments or [{}] * len(request.prompts)
        of_rows = zip(request.prompts, request.messages, arguments, strict=True)
        rows = [
            Row(None if messages else prompt, messages, None, None, {}, f"response {n}", template_arguments=variables)
            for n, (prompt, messages, variables) in enumerate(of_rows)
        ]
        texts, finished = ResponseTexts(request.prompts, request.responses, rows), request.finished
        owner = list(range(len(rows)))
        if request.segments is not None:
            owner = [n for n, own in enumerate(request.segments) for _ in own]
            segments = Segments(request.segments, [])
            texts, finished = prefix_texts(replace(texts, segments=segments), finished)
        with self._lock:
            scores, problems = self._read(texts, finished)
        for n, score in enumerate(scores):
            if not math.isfinite(score):
                problems.setdefault(n, f"the score of response {owner[n]} is {score}")
        numbers = [None if n in problems else x for n, x in enumerate(scores)]
        answer: dict[str, object] = {"scores": numbers}
        if request.segments is not None:
            left = iter(numbers)
            of_responses = [list(islice(left, len(own))) for own in request.segments]
            answer = {"scores": [None if None in own else own for own in of_responses]}
        return answer | ({"error": problems[min(problems)]} if problems else {})

    def _read(self, texts: ResponseTexts, finished: list[bool]) -> tuple[list[float], dict[int, str]]:
        """Numbers of texts, and what is wrong with some of them; each is read alone where one is refused."""
        try:
            scores, problems = self._reader.read(texts, finished)
            return scores.tolist(), problems
        except UserError as error:
            if len(finished) == 1:
                return [math.nan], {0: str(error)}
        alone = [self._read(texts.alone(n), [end]) for n, end in enumerate(finished)]
        return [score for (score,), _ in alone], {n: found[0] for n, (_, found) in enumerate(alone) if found}


class Connection(H11Protocol):
    """Ends where a request that is not whole stays silent for too long, or the server ends."""

    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Takes a piece of a request, and waits for the next."""
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no longer."""
        super().connection_lost(exc)
        if self._silence is not None:
            self._silence.cancel()

    def shutdown(self) -> None:
        """Answers what has come in full; the client asks again for the rest."""
        if self._is_whole():
            super().shutdown()
        else:
            self.transport.close()

    def _is_whole(self) -> bool:
        return self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)

    def _wait(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
        if not self._is_whole():
            self._silence = self.loop.call_later(self.config.timeout_keep_alive, self.transport.close)


def application(scorer: Callable[[ScoreRequest], Mapping[str, object]], model: str) -> FastAPI:
    """POST with texts, at any path, answers scores; GET at any path says that the server is well."""
    app = FastAPI(openapi_url=None)

    @app.get("/{path:path}")
    def health() -> Response:
        return _answer(200, {"status": "ok", "model": model, "version": VERSION})

    @app.post("/{path:path}")
    async def score(request: Request) -> Response:
        length = request.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_REQUEST:
            problem = f"the length of the request is missing or more than {LARGEST_REQUEST >> 20} MB"
            return _answer(400, {"error": problem}, {"Connection": "close"})
        try:
            body = await request.body()
        except ClientDisconnect:  # the client has gone, or the server ends: no answer, so that it is asked again
            return Response()
        return await run_in_threadpool(answered, body)

    def answered(body: bytes) -> Response:
        try:
            return _answer(200, scorer(ScoreRequest.read(body)))
        except BadRequest as error:
            return _answer(400, {"error": str(error)})
        except (RuntimeError, ValueError, IndexError) as error:  # of the model: memory, ids that it does not know
            logger.exception("a request failed")
            return _answer(500, {"error": f"{type(error).__name__}: {error}"})

    return app


def _answer(status: int, content: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")


class ScoreServer(uvicorn.Server):
    """Threads take requests; the model answers one after the other. At its end it waits for those under way."""

    def __init__(self, host: str, port: int, app: FastAPI, note: str = "") -> None:
        """Takes where to listen and what answers; raises UserError where the port is taken.

        Args:
            note: is logged before the address once the server answers.
        """
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise UserError(f"--host {host} --port {port}: {error.strerror}. Give another.") from error
        host, port = self._socket.getsockname()
        self.url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/score"  # as this machine reaches it
        self._note = note
        config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, access_log=False)
        config.timeout_keep_alive = SILENCE
        super().__init__(config)

    def answer(self) -> None:
        """Answers until SIGTERM or Ctrl-C, or `should_exit` is set."""
        self.run([self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it is."""
        await super().startup(sockets)
        if self._note:
            logger.info("%s: --reward_url %s", self._note, self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the connections; one that is only being made says nothing in time."""
        self.config.timeout_keep_alive = 0
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends at a signal, which is not passed on afterwards."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()


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
    note = f"scores of {options.model} on {device} ({dtype})"
    ScoreServer(options.host, options.port, application(Scorer(reader), options.model), note).answer()
    return "stopped"


if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
