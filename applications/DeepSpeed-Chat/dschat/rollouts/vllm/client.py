# SPDX-License-Identifier: Apache-2.0
"""What a run sends to the vLLM servers that `dschat serve-vllm` has started; docs/scaling.md describes them.

`ServerClient` sends requests over HTTP. A `WeightTransport` sends weights with it, in pieces over HTTP or by an NCCL
broadcast. NCCL is untried: no test has run it between GPUs. It is used where both sides have GPUs and vLLM.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httpx2
import torch
from torch import Tensor

from dschat.base.errors import ServerLost, UserError
from dschat.base.servers import open_async_client, open_client
from dschat.rollouts.vllm.requests import ResponseRequest, VllmResponse
from dschat.run.distributed import gather_objects

FLAG = "--vllm_url"
TOKEN = "VLLM_API_KEY"
MAX_CONNECTIONS = 256  # of one process to all servers; each takes a file descriptor
POST_TIMEOUT = 600.0  # seconds for one request with weights
HEALTH_TIMEOUT = 10.0  # seconds for the answer to a health check
UNAVAILABLE = (502, 503, 504)  # statuses of a server that is starting or ending
GENERATE = "/inference/v1/generate"
INITIAL_VERSION = "default"  # vLLM's name of the weights that it starts with
LOADING = ".loading"  # suffix of the version while weights are being sent
VERSION_HEADER = "X-Weight-Version"
# Requests to these routes name a version, so that the weights of two runs are never mixed.
WEIGHT_ROUTES = ("/start_weight_update", "/update_weights", "/finish_weight_update")
PIECE_BYTES = 1 << 24  # of a weight in one request

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
        """Takes addresses without a path; sends nothing yet. Raises UserError if one is invalid."""
        self.urls = [url.rstrip("/") for url in urls]
        token = os.environ.get(TOKEN)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = {url: open_client(url, FLAG, POST_TIMEOUT, self.headers) for url in self.urls}

    def info(self, url: str) -> ServerInfo:
        """What a server is. Raises UserError if it is of another kind, ServerLost if there is none."""
        try:
            answer = self._http[url].get(url + "/run", timeout=HEALTH_TIMEOUT)
        except httpx2.HTTPError as error:
            raise lost(url, f"does not answer: {error or type(error).__name__}") from error
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
            answer = self._http[url].post(url + path, json=body, headers=headers)
        except httpx2.HTTPError as error:
            raise lost(url, f"has gone: {error or type(error).__name__}") from error
        if answer.status_code == 500 and asyncio.run(is_healthy(url)):
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

        try:
            (choice,) = answer.json()["choices"]
            versions = [span["version"] for span in choice["weight_versions"]]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            response = VllmResponse(choice["token_ids"], logprobs)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{FLAG} {url}: its answer cannot be read: {error!r}.") from error
        for used_version in versions:
            if used_version != version:
                raise other_weights(url, used_version, version)
        return response


class WeightTransport(Protocol):
    """Sends weights to all servers, between `/start_weight_update` and `/finish_weight_update`."""

    def send(
        self,
        name: str,
        weight: Tensor,
        version: str,
    ) -> None:
        """Sends one weight and waits until every server has it. Raises UserError or ServerLost."""


class HttpTransport:
    """Sends each weight in pieces, base64 in JSON."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def send(
        self,
        name: str,
        weight: Tensor,
        version: str,
    ) -> None:
        """See `WeightTransport`."""
        for piece in pieces(name, weight):
            update = {**piece, "version": version}
            self._client.post_to_all("/update_weights", {"update_info": update}, version)


class NcclTransport:
    """Broadcasts each weight from the main process, rank 0, to the GPUs of all servers."""

    def __init__(
        self,
        client: ServerClient,
        run_info: Json,
        workers: Sequence[int],
    ) -> None:
        """Forms the NCCL group with all servers.

        Args:
            client: the servers.
            run_info: what the servers must know of the run, see `dschat.rollouts.vllm.worker.RunInfo`.
            workers: number of GPUs of each server.

        Raises:
            UserError, ServerLost: see `ServerClient.post_to_all`.
        """
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._client = client
        self._pool = ThreadPoolExecutor(1)
        host, port = rendezvous_address(client.urls[0])
        rendezvous = {"master_address": host, "master_port": port, "world_size": 1 + sum(workers)}
        client.post_to_all("/shutdown_weight_transfer_engine", {})  # ends an earlier group
        # Both sides wait for each other.
        joining = self._post("/init_weight_transfer_engine", join_requests(run_info, rendezvous, workers))
        self._stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        try:
            with torch.cuda.stream(self._stream):  # vLLM would set another one
                self._group = trainer_init(rendezvous)
        finally:
            if joining.done():
                joining.result()  # raises why no server joined
        joining.result()

    def send(
        self,
        name: str,
        weight: Tensor,
        version: str,
    ) -> None:
        """See `WeightTransport`."""
        update = {**describe_weight(name, weight), "version": version}
        bodies: list[Json] = [{"update_info": update}] * len(self._client.urls)
        receiving = self._post("/update_weights", bodies, version)
        if not receiving.done():  # otherwise a server has refused, and nobody would receive
            self._group.broadcast(
                weight.contiguous(),
                src=0,
                stream=self._stream,
            )
        receiving.result()

    def _post(
        self,
        path: str,
        bodies: Sequence[Json],
        version: str | None = None,
    ) -> Future[None]:
        return self._pool.submit(self._client.post_to_each, path, bodies, version)


def pieces(
    name: str,
    weight: Tensor,
    size: int = PIECE_BYTES,
) -> Iterator[Json]:
    """Splits a weight into requests of at most `size` bytes; see `dschat.rollouts.vllm.worker.WeightUpdate`."""
    description = describe_weight(name, weight)
    content = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
    for part in content.split(size):
        data = base64.b64encode(part.numpy().tobytes())
        yield {**description, "data": data.decode()}


def describe_weight(name: str, weight: Tensor) -> Json:
    """Name, dtype and shape of a weight, in the form of vLLM's weight transfer."""
    return {
        "names": [name],
        "dtype_names": [dtype_name(weight.dtype)],
        "shapes": [list(weight.shape)],
    }


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16 or float16."""
    return str(dtype).removeprefix("torch.")


def join_requests(
    run_info: Json,
    rendezvous: Mapping[str, object],
    workers: Sequence[int],
) -> list[Json]:
    """One request per server to join the NCCL group. The GPUs of each follow those of the servers before it."""
    requests: list[Json] = []
    rank_offset = 1  # rank 0 is the trainer's
    for worker_count in workers:
        nccl = {**rendezvous, "rank_offset": rank_offset}
        requests.append({"init_info": {**run_info, "nccl": nccl}})
        rank_offset += worker_count
    return requests


def rendezvous_address(url: str) -> tuple[str, int]:
    """This machine's address as a server sees it, and a free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(urlsplit(url).hostname or ""), 9))  # sends nothing
        address = probe.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((address, 0))
        return address, listener.getsockname()[1]


def is_version_of_run(version: str, run: str) -> bool:
    """Whether a version of weights, RUN.NUMBER, belongs to a run."""
    return version.rpartition(".")[0] == run


async def is_healthy(url: str) -> bool:
    """Whether a server answers a health check."""
    try:
        async with open_async_client(url, FLAG, HEALTH_TIMEOUT) as http:
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


def raise_on_all_ranks(problem: UserError | None) -> None:
    """Raises on every rank the problem of any rank. A refusal goes before a lost server. Every rank must call it."""
    problems = [item for item in gather_objects(problem) if item is not None]
    problems.sort(key=lambda item: (isinstance(item, ServerLost), str(item)))
    if problems:
        raise problems[0]
