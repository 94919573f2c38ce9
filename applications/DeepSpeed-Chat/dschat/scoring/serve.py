# SPDX-License-Identifier: Apache-2.0
"""Serves a reward model to --reward_url: `dschat serve --model FOLDER`. See docs/rewards.md."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from dschat.base.errors import UserError
from dschat.scoring.score_request import BadRequest, ScoreRequest
from dschat.settings.commands import ServeOptions
from dschat.settings.rewards import REWARD_TOKEN

if TYPE_CHECKING:
    from dschat.scoring.reward_reader import RewardReader
    from dschat.scoring.source import ResponseTexts

logger = logging.getLogger("dschat.scoring.serve")

LARGEST_REQUEST = 32 << 20  # bytes
MOST_CHARACTERS = 16  # of a text, for each token that it may have: longer ones are refused before they are encoded
SILENCE = 60  # seconds that a connection may say nothing
GRACE = 30.0  # seconds after a signal in which requests under way are answered


class Scorer:
    """A model that one request at a time may use."""

    def __init__(self, reader: RewardReader, max_tokens: int | None = None) -> None:
        """Takes a model, and how many tokens of a text it reads; as many as it can if not given."""
        self._reader = reader
        self._max_tokens = max_tokens
        if max_tokens is not None:
            reader.shorten(max_tokens)
        self._lock = threading.Lock()

    def __call__(self, request: ScoreRequest) -> dict[str, object]:
        """The answer: a number for each response, None where there is none, and why the first of these has none.

        Raises:
            BadRequest: a text is so long that it is not even encoded.
        """
        self._require_short(request)
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

    def _require_short(self, request: ScoreRequest) -> None:
        if self._max_tokens is None:
            return
        most = MOST_CHARACTERS * self._max_tokens
        arguments = request.template_arguments or [{}] * len(request.prompts)
        rows = zip(request.prompts, request.messages, arguments, request.responses, strict=True)
        for number, (prompt, messages, variables, response) in enumerate(rows):
            talk = 0 if messages is None else len(str(messages))
            further = len(str(variables)) if variables else 0  # a template reads them beside a prompt, too
            before = max(len(prompt), talk) + further
            if before + len(response) > most:
                raise BadRequest(
                    f"response {number} and its prompt have {before + len(response):,} characters; this server reads"
                    f" {self._max_tokens:,} tokens, and refuses more than {most:,} characters. Send shorter texts, or"
                    " raise --max_tokens of the server",
                    422,
                )

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


def application(scorer: Callable[[ScoreRequest], Mapping[str, object]], model: str, token: str = "") -> FastAPI:
    """POST with texts, at any path, answers scores; GET at any path says that the server is well.

    Args:
        scorer: what answers; raises BadRequest.
        model: its name.
        token: whoever asks for scores must send it, if there is one: `Authorization: Bearer TOKEN`.
    """
    app = FastAPI(openapi_url=None)

    def is_trusted(request: Request) -> bool:
        header = request.headers.get("Authorization", "")
        return not token or hmac.compare_digest(header.encode(), f"Bearer {token}".encode())

    @app.get("/{path:path}")
    def health(request: Request) -> Response:
        about = {"model": model} if is_trusted(request) else {}
        return _answer(200, {"status": "ok", **about})

    @app.post("/{path:path}")
    async def score(request: Request) -> Response:
        if not is_trusted(request):
            problem = f"the token is missing or wrong: set {REWARD_TOKEN} to what it is where the server was started"
            return _answer(401, {"error": problem}, {"Connection": "close"})
        try:
            body = await _body(request)
        except BadRequest as error:
            return _answer(error.status, {"error": str(error)}, {"Connection": "close"})
        except ClientDisconnect:  # the client has gone, or the server ends: no answer, so that it is asked again
            return Response()
        return await run_in_threadpool(answered, body)

    def answered(body: bytes) -> Response:
        try:
            return _answer(200, scorer(ScoreRequest.read(body)))
        except BadRequest as error:
            return _answer(error.status, {"error": str(error)})
        except (RuntimeError, ValueError, IndexError) as error:  # of the model: memory, ids that it does not know
            logger.exception("a request failed")
            return _answer(500, {"error": f"{type(error).__name__}: {error}"})

    return app


async def _body(request: Request) -> bytes:
    """The content of a request. Raises BadRequest where it is too long, or does not say how long it is."""
    length = request.headers.get("Content-Length", "")
    if not length.isdecimal():
        raise BadRequest("the length of the request is missing", 411)
    too_long = BadRequest(f"the request is more than {LARGEST_REQUEST >> 20} MB: lower --reward_batch", 413)
    if int(length) > LARGEST_REQUEST:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_REQUEST:  # sent in chunks, whatever length it names
            raise too_long
    return bytes(body)


def _answer(status: int, content: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")


class ScoreServer(uvicorn.Server):
    """Threads take requests; the model answers one after the other.

    At SIGTERM or Ctrl-C it answers those under way, for at most `GRACE` seconds; a second signal ends it at once.
    """

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
        self._end: threading.Timer | None = None  # of the process, after a signal
        config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, access_log=False)
        config.timeout_keep_alive = SILENCE
        super().__init__(config)

    def answer(self) -> None:
        """Answers until SIGTERM or Ctrl-C, or `should_exit` is set."""
        try:
            self.run([self._socket])
        finally:
            if self._end is not None:
                self._end.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stops at the first signal, and ends the process at the second; a forward pass cannot be interrupted."""
        if self._end is not None:
            _end_process(sig, "a second signal")
            return
        super().handle_exit(sig, frame)
        reason = f"requests were still under way {GRACE:g} s after the signal"
        self._end = threading.Timer(GRACE, _end_process, [sig, reason])
        self._end.daemon = True
        self._end.start()

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


def _end_process(number: int, reason: str) -> None:
    """Ends this process with the status of a signal, whatever its threads are doing."""
    logger.warning("stopped: %s; what was not answered is asked for again by a run", reason)
    os._exit(128 + number)


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
    app = application(Scorer(reader, options.max_tokens), options.model, os.environ.get(REWARD_TOKEN, ""))
    ScoreServer(options.host, options.port, app, note).answer()
    return "stopped"
