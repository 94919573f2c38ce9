# SPDX-License-Identifier: Apache-2.0
"""HTTP requests to vLLM servers that `dschat serve-vllm` has started. docs/scaling.md describes them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import httpx2

from dschat.base.errors import ServerLost, UserError
from dschat.rollouts.vllm.requests import ResponseRequest, VllmResponse
from dschat.run.stop import is_stopping_here, raise_if_stopped_here

FLAG = "--vllm_url"
TOKEN = "VLLM_API_KEY"
# Concurrent requests of one process, and seconds to keep an idle connection, fewer than the servers keep it.
LIMITS = httpx2.Limits(max_connections=256, keepalive_expiry=1.0)
POST_TIMEOUT = 600.0  # seconds for one request with weights
HEALTH_INTERVAL = 5.0  # seconds between two health checks of a server that owes responses
HEALTH_TIMEOUT = 10.0  # seconds for its answer
UNAVAILABLE = (502, 503, 504)  # statuses of a server that is starting or ending
STOP_PATIENCE = 20.0  # seconds that a run which must stop waits for a rollout sampled ahead
POLL_INTERVAL = 0.1  # seconds between two checks for a signal
GENERATE = "/inference/v1/generate"
INITIAL_VERSION = "default"  # vLLM's name of the weights that it starts with
LOADING = ".loading"  # suffix of the version while weights are being sent
VERSION_HEADER = "X-Weight-Version"
# Requests to these routes name a version, so that the weights of two runs are never mixed.
WEIGHT_ROUTES = ("/start_weight_update", "/update_weights", "/finish_weight_update")

Json = dict[str, object]


@dataclass(frozen=True)
class ServerInfo:
    """What a server reports about itself at `GET /run`."""

    backend: str | None  # how it takes weights
    device: str  # "cuda" or "cpu"
    dtype: str  # of its weights, in torch's spelling
    vocabulary: int  # tokens
    max_tokens: int  # longest prompt and response together
    workers: int  # GPUs that share the model
    version: str  # of its weights


class ServerClient:
    """Sends requests to the servers of a run, each of which holds all of the actor's weights."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Takes addresses without a path; sends nothing yet."""
        self.urls = [url.rstrip("/") for url in urls]
        token = os.environ.get(TOKEN)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx2.Client(
            headers=self.headers,
            timeout=POST_TIMEOUT,
            limits=LIMITS,
        )

    def info(self, url: str) -> ServerInfo:
        """What a server is. Raises UserError if it is of another kind, ServerLost if there is none."""
        try:
            answer = self._http.get(url + "/run", timeout=HEALTH_TIMEOUT)
        except httpx2.HTTPError as error:
            raise lost(url, f"does not answer: {error or type(error).__name__}") from error
        except httpx2.InvalidURL as error:
            raise UserError(f"{FLAG} {url} is not an address: {error}.") from error
        if answer.status_code in (401, 500, *UNAVAILABLE):
            _check_status(url, answer)
        if answer.status_code == 200:
            with suppress(TypeError, ValueError):  # a server of another kind may answer anything
                return ServerInfo(**answer.json())
        raise UserError(f"{FLAG} {url}: this server takes no weights of a run. Start it with dschat serve-vllm.")

    def post_to_all(
        self,
        path: str,
        body: Json,
        version: str | None = None,
    ) -> None:
        """Sends a request to all servers at once and waits for the answers.

        Args:
            path: route.
            body: JSON content.
            version: version of the weights that the request belongs to; a server with others refuses it.

        Raises:
            UserError: a server refuses, or another run uses it.
            ServerLost: a server does not answer, or has restarted.
        """
        self.post_to_each(path, [body] * len(self.urls), version)

    def post_to_each(
        self,
        path: str,
        bodies: Sequence[Json],
        version: str | None = None,
    ) -> None:
        """Like `post_to_all`, with a body for each server."""
        with ThreadPoolExecutor(len(self.urls)) as pool:
            posts = []
            for url, body in zip(self.urls, bodies, strict=True):
                posts.append(pool.submit(self._post, url, path, body, version))
        for post in posts:
            post.result()

    def _post(
        self,
        url: str,
        path: str,
        body: Json,
        version: str | None,
    ) -> None:
        headers = {} if version is None else {VERSION_HEADER: version}
        try:
            answer = self._http.post(
                url + path,
                json=body,
                headers=headers,
            )
        except httpx2.HTTPError as error:
            raise lost(url, f"has gone: {error or type(error).__name__}") from error
        if answer.status_code == 500 and asyncio.run(_is_healthy(url)):
            raise _refusal(url, answer)  # of this request; otherwise the engine has died
        if answer.status_code == 409 and version is not None:
            raise other_weights(url, answer.json()["version"], version)
        _check_status(url, answer)

    async def generate(
        self,
        http: httpx2.AsyncClient,
        url: str,
        request: ResponseRequest,
        version: str,
    ) -> VllmResponse:
        """Samples one response. Raises UserError if the server refuses, ServerLost if it or its weights are gone."""
        body = json.dumps({"token_ids": request.prompt, "sampling_params": request.parameters})  # has infinities
        headers = {"Content-Type": "application/json", VERSION_HEADER: version}
        try:
            answer = await http.post(url + GENERATE, content=body, headers=headers)
        except httpx2.HTTPError as error:
            raise lost(url, f"has gone: {error or type(error).__name__}") from error
        if answer.status_code == 409:
            raise other_weights(url, answer.json()["version"], version)
        _check_status(url, answer)

        (choice,) = answer.json()["choices"]
        for span in choice["weight_versions"]:
            if span["version"] != version:
                raise other_weights(url, span["version"], version)
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return VllmResponse(choice["token_ids"], logprobs)


class BackgroundGeneration:
    """Responses that the servers sample while this process continues; a thread collects them."""

    def __init__(
        self,
        client: ServerClient,
        requests: Sequence[ResponseRequest],
        first_server: int,
        version: str,
        timeout: float,
    ) -> None:
        """Sends the requests.

        Args:
            client: the servers, which get the requests in turn.
            requests: one per response.
            first_server: number of the server that gets the first request.
            version: version of the weights to sample with.
            timeout: seconds in which each server must finish one more response.
        """
        self._client = client
        self._requests = requests
        self._first_server = first_server
        self._version = version
        self._timeout = timeout
        self._responses: dict[int, VllmResponse] = {}
        self._problem: UserError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def responses(self) -> list[VllmResponse]:
        """All responses in the order of the requests, once they are finished."""
        return [self._responses[number] for number in range(len(self._requests))]

    def wait(self) -> UserError | None:
        """Waits until all responses are finished; returns what went wrong, if anything did.

        Raises Stopped soon after a signal, on this rank alone.
        """
        while self._thread.is_alive():
            raise_if_stopped_here()
            self._thread.join(POLL_INTERVAL)
        return self._problem

    def wait_despite_signals(self) -> UserError | None:
        """Like `wait`, but a signal only limits the wait to STOP_PATIENCE seconds."""
        deadline = math.inf
        while self._thread.is_alive():
            if is_stopping_here():
                deadline = min(deadline, time.monotonic() + STOP_PATIENCE)
            if time.monotonic() > deadline:
                return ServerLost("responses are still being sampled")
            self._thread.join(POLL_INTERVAL)
        return self._problem

    def _run(self) -> None:
        try:
            asyncio.run(self._generate_on_all())
        except UserError as error:
            self._problem = error
        except Exception as error:
            self._problem = UserError(f"{FLAG}: a server's answer cannot be read: {error!r}.")

    async def _generate_on_all(self) -> None:
        """Deals the requests to the servers; raises the first problem of any of them."""
        urls = self._client.urls
        requests_by_url: dict[str, dict[int, ResponseRequest]] = {url: {} for url in urls}
        for number, request in enumerate(self._requests):
            url = urls[(self._first_server + number) % len(urls)]
            requests_by_url[url][number] = request
        async with httpx2.AsyncClient(
            headers=self._client.headers,
            timeout=None,
            limits=LIMITS,
        ) as http:
            servers = []
            for url, requests in requests_by_url.items():
                servers.append(self._generate_on(http, url, requests))
            results = await asyncio.gather(*servers, return_exceptions=True)
        problems = [result for result in results if isinstance(result, BaseException)]
        # A lost server comes last: resuming would not help against the other problems.
        problems.sort(key=lambda problem: isinstance(problem, ServerLost))
        if problems:
            raise problems[0]

    async def _generate_on(
        self,
        http: httpx2.AsyncClient,
        url: str,
        requests: Mapping[int, ResponseRequest],
    ) -> None:
        """Sends the requests of one server and collects its responses; after a problem, the others are cancelled."""
        numbers: dict[asyncio.Task[VllmResponse], int] = {}
        for number, request in requests.items():
            task = asyncio.create_task(self._client.generate(http, url, request, self._version))
            numbers[task] = number

        try:
            await self._collect(url, numbers)
        finally:
            for task in numbers:
                task.cancel()
            await asyncio.gather(*numbers, return_exceptions=True)

    async def _collect(
        self,
        url: str,
        numbers: Mapping[asyncio.Task[VllmResponse], int],
    ) -> None:
        """Waits for the responses of one server. Raises ServerLost if it hangs or does not answer."""
        pending = set(numbers)
        last_finished = time.monotonic()
        failed_checks = 0
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=min(HEALTH_INTERVAL, self._timeout), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                self._responses[numbers[task]] = task.result()
            if done:
                last_finished = time.monotonic()
                failed_checks = 0
                continue
            if time.monotonic() - last_finished > self._timeout:
                raise _hangs(url, self._timeout)
            # No connection notices that a machine has been switched off.
            failed_checks = 0 if await _is_healthy(url) else failed_checks + 1
            if failed_checks > 1:
                raise lost(url, "does not answer")


async def _is_healthy(url: str) -> bool:
    try:
        async with httpx2.AsyncClient(timeout=HEALTH_TIMEOUT) as http:
            answer = await http.get(url + "/health")
    except httpx2.HTTPError:
        return False
    return answer.status_code == 200


def lost(url: str, reason: str) -> ServerLost:
    """The error for a server that is gone, or was never there."""
    return ServerLost(
        f"{FLAG} {url} {reason}. Start it (dschat serve-vllm) and give the same command again; a run that has begun "
        "resumes with --resume_from_checkpoint."
    )


def _hangs(url: str, timeout: float) -> ServerLost:
    return ServerLost(
        f"{FLAG} {url} has finished no response for {timeout:g} s (--vllm_timeout), though it reports that it is"
        " healthy: its engine hangs, or its responses take longer. Start it again and continue with"
        " --resume_from_checkpoint, or raise --vllm_timeout."
    )


def other_weights(url: str, version: str, expected: str) -> UserError:
    """The error for a server with other weights than expected: it has restarted, or another run uses it."""
    if version == INITIAL_VERSION:
        return lost(url, "has been started anew, without this run's weights")
    return UserError(
        f"{FLAG} {url} has weights {version} and not {expected}, which this run has sent: another run uses the server."
        " Give each run servers of its own."
    )


def _check_status(url: str, answer: httpx2.Response) -> None:
    """Raises UserError, or ServerLost if the server is about to end, for every status but 200."""
    if answer.status_code == 200:
        return
    if answer.status_code == 401:
        raise UserError(f"{FLAG} {url}: {_text_of(answer)}. Set {TOKEN} to its value where the server was started.")
    if answer.status_code in (500, *UNAVAILABLE):  # vLLM's engine has died, or is not up yet
        raise lost(url, f"answers {answer.status_code}: {_text_of(answer)}")
    raise _refusal(url, answer)


def _refusal(url: str, answer: httpx2.Response) -> UserError:
    return UserError(f"{FLAG} {url}: it refuses, {answer.status_code}: {_text_of(answer)}. Its own log may say more.")


def _text_of(answer: httpx2.Response) -> str:
    return " ".join(answer.text.split())[:300]
