# SPDX-License-Identifier: Apache-2.0
"""Requests to vLLM servers that `dschat serve-vllm` has started. docs/scaling.md describes them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import httpx2

from dschat.base.errors import UserError
from dschat.run.stop import is_stopping_here, raise_if_stopped_here

FLAG = "--vllm_url"
TOKEN = "VLLM_API_KEY"
# Of one process: requests that are under way at a time, and seconds for which an idle connection is kept, fewer than
# the servers keep it.
LIMITS = httpx2.Limits(max_connections=256, keepalive_expiry=1.0)
POST_TIMEOUT = 600.0  # seconds for a weight, or for all of them by NCCL
LOOK, LOOK_TIMEOUT = 5.0, 10.0  # seconds between two looks whether a server lives, and for its answer
TEMPORARY = (502, 503, 504)  # statuses of a server that is about to start, or to end
PATIENCE_AT_STOP = 20.0  # seconds that a run which must stop waits for what it draws ahead
TICK = 0.1  # seconds between two looks for a signal
GENERATE = "/inference/v1/generate"
FRESH = "default"  # vLLM's name of the weights that nobody has sent
LOADING = ".loading"  # behind the version of weights that are on their way
VERSION_HEADER = "X-Weight-Version"
# Routes of weights. A request names their version, so that the pieces of two runs are never put together.
WEIGHT_ROUTES = ("/start_weight_update", "/update_weights", "/finish_weight_update")

Json = dict[str, object]


class Lost(Exception):
    """A server has gone, or has lost the weights; it may come back."""


@dataclass(frozen=True)
class About:
    """What a server says of itself."""

    backend: str | None  # how it takes weights
    device: str  # "cuda" or "cpu"
    dtype: str  # of its weights, as torch calls it
    vocabulary: int  # tokens
    max_tokens: int  # of a prompt with its response
    workers: int  # GPUs that share the model
    version: str  # of its weights


@dataclass(frozen=True)
class ResponseRequest:
    """One response that is asked for."""

    prompt: list[int]
    parameters: Json  # see `dschat.rollouts.vllm.sampling_parameters`


Answer = tuple[list[int], list[float]]  # the tokens of a response and their log-probs


class Servers:
    """The servers of a run, each with all of the actor's weights."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Takes addresses without a path; asks nothing yet."""
        self.urls = [url.rstrip("/") for url in urls]
        token = os.environ.get(TOKEN)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx2.Client(headers=self.headers, timeout=POST_TIMEOUT, limits=LIMITS)

    def about(self) -> list[About]:
        """What each server is. Raises UserError for one that is something else, Lost where there is none."""
        return [self._about(url) for url in self.urls]

    def post(self, path: str, bodies: Json | Sequence[Json], version: str | None = None) -> None:
        """One request to every server, at the same time, and waits for the answers.

        Args:
            path: of the route.
            bodies: the JSON of all, or of each.
            version: of the weights that it is about; a server that takes others refuses it.

        Raises:
            UserError: a server refuses, or another run uses it.
            Lost: one does not answer, or was started anew.
        """
        each = [bodies] * len(self.urls) if isinstance(bodies, dict) else bodies
        with ThreadPoolExecutor(len(self.urls)) as pool:
            list(pool.map(lambda url, body: self._post(url, path, body, version), self.urls, each))

    def _post(self, url: str, path: str, body: Json, version: str | None) -> None:
        headers = {} if version is None else {VERSION_HEADER: version}
        try:
            answer = self._client.post(url + path, json=body, headers=headers)
        except httpx2.HTTPError as error:
            raise Lost(f"{url} has gone: {error or type(error).__name__}") from error
        if answer.status_code == 500 and not asyncio.run(_lives(url)):
            raise Lost(f"{url} has gone: {_said(answer)}")
        if answer.status_code == 409 and version is not None:
            raise other_weights(url, answer.json()["version"], version)
        _require_ok(url, answer)

    def _about(self, url: str) -> About:
        try:
            answer = self._client.get(url + "/run", timeout=LOOK_TIMEOUT)
        except httpx2.HTTPError as error:
            raise Lost(f"{url} does not answer: {error or type(error).__name__}") from error
        except httpx2.InvalidURL as error:
            raise UserError(f"{FLAG} {url} is no address: {error}.") from error
        if answer.status_code == 500:
            raise Lost(f"{url} answers {answer.status_code}: {_said(answer)}")
        if answer.status_code in (401, *TEMPORARY):
            _require_ok(url, answer)
        if answer.status_code == 200:
            with suppress(TypeError, ValueError):  # of another kind of server, which answers anything
                return About(**answer.json())
        raise UserError(f"{FLAG} {url}: this server takes no weights of a run. Start it with dschat serve-vllm.")

    async def row(self, client: httpx2.AsyncClient, url: str, row: ResponseRequest, version: str) -> Answer:
        """One response. Raises UserError where the server refuses, Lost where it has gone or lost the weights."""
        body = json.dumps({"token_ids": row.prompt, "sampling_params": row.parameters})  # with infinities
        headers = {"Content-Type": "application/json", VERSION_HEADER: version}
        try:
            answer = await client.post(url + GENERATE, content=body, headers=headers)
        except httpx2.HTTPError as error:
            raise Lost(f"{url} has gone: {error or type(error).__name__}") from error
        if answer.status_code == 500:  # vLLM's engine has died, and its server is about to end
            raise Lost(f"{url} answers {answer.status_code}: {_said(answer)}")
        if answer.status_code == 409:
            raise other_weights(url, answer.json()["version"], version)
        _require_ok(url, answer)
        (choice,) = answer.json()["choices"]
        for span in choice["weight_versions"]:
            if span["version"] != version:
                raise other_weights(url, span["version"], version)
        return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


class BackgroundGeneration:
    """Rows that servers are drawing, in a thread of its own."""

    def __init__(
        self, servers: Servers, rows: Mapping[int, ResponseRequest], first: int, version: str, timeout: float
    ) -> None:
        """Begins.

        Args:
            servers: get the rows in turn.
            rows: by number.
            first: number of the server that gets the first row.
            version: of the weights.
            timeout: seconds in which each server must finish one more response.
        """
        self._timeout = timeout
        self.rows, self.answers = rows, dict[int, Answer]()
        self._servers, self._first, self._version = servers, first, version
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Until all rows are drawn, or cannot be: then a UserError or Lost. The rows that are have answers. Raises
        Stopped soon after a signal, on this rank alone.
        """
        while self._thread.is_alive():
            raise_if_stopped_here()
            self._thread.join(TICK)
        return self._problem

    def settle(self) -> Exception | None:
        """The same whatever signals come; after one, it waits for a while only."""
        end = math.inf
        while self._thread.is_alive():
            if is_stopping_here():
                end = min(end, time.monotonic() + PATIENCE_AT_STOP)
            if time.monotonic() > end:
                return Lost("responses are still being drawn")
            self._thread.join(TICK)
        return self._problem

    def _run(self) -> None:
        try:
            asyncio.run(self._draw())
        except (Lost, UserError) as error:
            self._problem = error
        except Exception as error:
            self._problem = UserError(f"{FLAG}: a server's answer cannot be read: {error!r}.")

    async def _draw(self) -> None:
        """Raises the first problem once every row has been drawn, or cannot be."""
        urls = self._servers.urls
        async with httpx2.AsyncClient(headers=self._servers.headers, timeout=None, limits=LIMITS) as client:
            tasks: dict[asyncio.Task[Answer], tuple[int, str]] = {}
            for place, (number, row) in enumerate(self.rows.items(), self._first):
                url = urls[place % len(urls)]
                tasks[asyncio.create_task(self._servers.row(client, url, row, self._version))] = number, url
            gone: Counter[str] = Counter()
            pending = set(tasks)
            latest = dict.fromkeys(urls, time.monotonic())  # when each server finished a response
            hung: set[str] = set()
            while pending:
                done, pending = await asyncio.wait(pending, timeout=min(LOOK, self._timeout))
                latest |= {tasks[task][1]: time.monotonic() for task in done}
                for task in pending:
                    if time.monotonic() - latest[tasks[task][1]] > self._timeout:
                        hung.add(tasks[task][1])
                        task.cancel()
                for url in {tasks[task][1] for task in pending} - hung:
                    gone[url] = 0 if await _lives(url) else gone[url] + 1
                for task in pending:
                    if gone[tasks[task][1]] > 1:  # its machine may be off, which no connection notices
                        task.cancel()
        problems: list[BaseException] = []
        for task, (number, url) in tasks.items():
            if task.cancelled() and url in hung:
                problems.append(_hangs(url, self._timeout))
            elif task.cancelled():
                problems.append(Lost(f"{url} does not answer"))
            elif (error := task.exception()) is not None:
                problems.append(error)
            else:
                self.answers[number] = task.result()
        for problem in sorted(problems, key=lambda problem: isinstance(problem, Lost)):  # refusals first
            raise problem


async def _lives(url: str) -> bool:
    try:
        async with httpx2.AsyncClient(timeout=LOOK_TIMEOUT) as client:
            return (await client.get(url + "/health")).status_code == 200
    except httpx2.HTTPError:
        return False


def _hangs(url: str, timeout: float) -> UserError:
    return UserError(
        f"{FLAG} {url} has finished no response for {timeout:g} s (--vllm_timeout), though it says that it is well:"
        " its engine hangs, or its responses take longer. Start it again and go on with --resume_from_checkpoint, or"
        " raise --vllm_timeout."
    )


def other_weights(url: str, found: str, wanted: str) -> Exception:
    """What it means that a server has them."""
    if found != FRESH:
        return UserError(
            f"{FLAG} {url} has weights {found} and not {wanted}, which this run has sent: another run uses the server."
            " Give each run servers of its own."
        )
    return Lost(f"{url} has been started anew, without this run's weights")


def _require_ok(url: str, answer: httpx2.Response) -> None:
    """Raises UserError, or Lost where there may be a better answer later."""
    if answer.status_code == 200:
        return
    said = _said(answer)
    if answer.status_code == 401:
        raise UserError(f"{FLAG} {url}: {said}. Set {TOKEN} to what it is where the server was started.")
    if answer.status_code in TEMPORARY:
        raise Lost(f"{url} answers {answer.status_code}: {said}")
    raise UserError(f"{FLAG} {url}: it refuses, {answer.status_code}: {said}. Its own log may say more.")


def _said(answer: httpx2.Response) -> str:
    return " ".join(answer.text.split())[:300]
