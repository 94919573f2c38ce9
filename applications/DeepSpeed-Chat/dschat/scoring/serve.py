# SPDX-License-Identifier: Apache-2.0
"""Serves a reward model to --reward_url: `dschat serve --model FOLDER`. See docs/rewards.md."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from dschat.base.errors import UserError
from dschat.base.secrets import secret_of
from dschat.base.trusted_hosts import TrustedHosts
from dschat.scoring.score_request import BadRequest, ScoreRequest
from dschat.settings.commands import ServeOptions
from dschat.settings.rewards import REWARD_TOKEN

if TYPE_CHECKING:
    from dschat.scoring.reward_reader import RewardReader
    from dschat.scoring.source import ResponseTexts

logger = logging.getLogger("dschat.scoring.serve")

MAX_REQUEST_BYTES = 32 << 20
SILENCE = 60  # seconds until an idle connection is closed
GRACE = 30  # seconds after a signal in which requests may be completed


class Scorer:
    """Scores requests; `application` gives it one at a time."""

    def __init__(self, reader: RewardReader, max_tokens: int | None = None) -> None:
        """Takes a reward model, and the maximum number of tokens of a text; the model's own limit if not given."""
        self._reader = reader
        if max_tokens is not None:
            reader.shorten(max_tokens)

    def __call__(self, request: ScoreRequest) -> dict[str, object]:
        """The answer: "scores", a number or None for each response, and the reason for the first None as "error"."""
        from dschat.data.rows import Row
        from dschat.scoring.segments import Segments
        from dschat.scoring.source import ResponseTexts, prefix_texts

        count = len(request.prompts)
        arguments = request.template_arguments or [{}] * count
        rows: list[Row] = []
        for number, messages in enumerate(request.messages or [None] * count):
            prompt = None if messages else request.prompts[number]
            origin = f"response {number}"
            rows.append(Row(prompt, messages, None, None, {}, origin, template_arguments=arguments[number]))
        texts = ResponseTexts(request.prompts, request.responses, rows, request.finished or [True] * count)
        if request.segments is not None:
            segments = Segments(request.segments, [])
            texts = prefix_texts(replace(texts, segments=segments))

        scores, problems = self._read(texts)
        for number, score in enumerate(scores):
            if not math.isfinite(score):
                problems.setdefault(number, f"the score of {texts.rows[number].origin} is {score}")
        numbers = [None if number in problems else score for number, score in enumerate(scores)]

        answer: dict[str, object] = {"scores": numbers}
        if request.segments is not None:
            answer["scores"] = _by_response(numbers, request.segments)
        if problems:
            answer["error"] = problems[min(problems)]
        return answer

    def _read(self, texts: ResponseTexts) -> tuple[list[float], dict[int, str]]:
        """Scores of texts, and problems by number of the text. If a text is refused, each is read alone."""
        try:
            scores, problems = self._reader.read(texts)
            return scores.tolist(), problems
        except UserError as error:
            if len(texts.responses) == 1:
                return [math.nan], {0: str(error)}
        all_scores: list[float] = []
        all_problems: dict[int, str] = {}
        for number in range(len(texts.responses)):
            text_scores, text_problems = self._read(texts.alone(number))
            all_scores += text_scores
            if text_problems:
                all_problems[number] = text_problems[0]
        return all_scores, all_problems


def _by_response(
    numbers: Sequence[float | None], segments: Sequence[Sequence[str]]
) -> list[list[float | None] | None]:
    """Groups the numbers of macro actions by response; None for a response that lacks one."""
    remaining = iter(numbers)
    groups: list[list[float | None] | None] = []
    for texts in segments:
        group = list(islice(remaining, len(texts)))
        groups.append(None if None in group else group)
    return groups


def application(scorer: Callable[[ScoreRequest], Mapping[str, object]], model: str, token: str = "") -> FastAPI:
    """The web application: POST with texts returns scores, GET returns the server's status, both at any path.

    Args:
        scorer: maps a request to its answer; raises BadRequest.
        model: name of the model.
        token: if not empty, requests for scores must send it as `Authorization: Bearer TOKEN`.
    """
    app = FastAPI(openapi_url=None)
    one_at_a_time = asyncio.Lock()

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
        except ClientDisconnect:  # or the server stops: without an answer, the client repeats the request
            return Response()
        async with one_at_a_time:
            if await request.is_disconnected():  # its client does not wait any more, and may have repeated it
                return Response()
            return await run_in_threadpool(answer_body, body)

    def answer_body(body: bytes) -> Response:
        try:
            return _answer(200, scorer(ScoreRequest.read(body)))
        except BadRequest as error:
            return _answer(error.status, {"error": str(error)})
        except (RuntimeError, ValueError, IndexError) as error:  # from the model: out of memory, unknown ids
            logger.exception("a request failed")
            return _answer(500, {"error": f"{type(error).__name__}: {error}"})

    return app


async def _body(request: Request) -> bytes:
    """The content of a request. Raises BadRequest if it is too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_REQUEST_BYTES:
            raise BadRequest(f"the request is more than {MAX_REQUEST_BYTES >> 20} MB: lower --reward_batch", 413)
    return bytes(body)


def _answer(status: int, content: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")


class ScoreServer(uvicorn.Server):
    """Receives requests in threads; the model answers one after another.

    At SIGTERM or Ctrl-C it answers what it can of the pending requests within `GRACE` seconds.
    """

    def __init__(self, host: str, port: int, app: FastAPI, note: str = "") -> None:
        """Opens the port.

        Args:
            host: address to listen on.
            port: to listen on; 0 selects a free one.
            app: answers requests.
            note: logged before the address once the server answers.

        Raises:
            UserError: the port is in use.
        """
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise UserError(f"--host {host} --port {port}: {error.strerror}. Give another.") from error
        address, port = self._socket.getsockname()[:2]
        local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
        shown_host = f"[{local_host}]" if ":" in local_host else local_host
        self.url = f"http://{shown_host}:{port}/score"  # for clients on this machine
        self._note = note
        config = uvicorn.Config(
            TrustedHosts(app, host),
            http="h11",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=SILENCE,
            timeout_graceful_shutdown=GRACE,
        )
        super().__init__(config)

    def answer(self) -> None:
        """Answers until SIGTERM or Ctrl-C, or `should_exit` is set."""
        self.run([self._socket])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Logs the address."""
        await super().startup(sockets)
        if self._note:
            logger.info("%s: --reward_url %s", self._note, self.url)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stops at a signal, which is not raised again afterwards."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()


def serve(options: ServeOptions) -> str:
    """`dschat serve`: opens the model and answers until SIGTERM or Ctrl-C. Raises UserError."""
    from dschat.models.opening import choose_device, choose_dtype
    from dschat.scoring.reward_reader import load_reward_model
    from dschat.scoring.reward_tokenizer import ReaderFlags, load_reward_tokenizer

    flags = ReaderFlags("--model", "--rm_template", "Send shorter texts")
    tokenizer = load_reward_tokenizer(options.model, options.rm_template, flags)
    device = choose_device(device=options.device)
    dtype = choose_dtype(options.dtype, device)
    reader = load_reward_model(options.model, tokenizer, options.rm_template, device, dtype, options.batch_size, flags)
    note = f"scores of {options.model} on {device} ({dtype})"
    app = application(Scorer(reader, options.max_tokens), options.model, secret_of(REWARD_TOKEN))
    ScoreServer(options.host, options.port, app, note).answer()
    return "stopped"
