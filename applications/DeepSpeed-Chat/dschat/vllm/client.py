# SPDX-License-Identifier: Apache-2.0
"""What a run sends to the vLLM servers that `dschat serve-vllm` has started; docs/scaling.md describes them.

`ServerClient` sends requests over HTTP. Weights go as raw bytes over HTTP (`send_over_http`) or by an NCCL broadcast
(`NcclTransport`). NCCL is untried: no test has run it between GPUs. It is used where both sides have GPUs and vLLM.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import httpx2
import torch
from torch import Tensor

from dschat.base.errors import ServerLost, UserError
from dschat.base.secrets import secret_of
from dschat.base.servers import open_async_client, open_client
from dschat.run.distributed import gather_objects
from dschat.vllm.requests import ResponseRequest, VllmResponse

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

FLAG = "--vllm_url"
TOKEN = "VLLM_API_KEY"
POST_TIMEOUT = 600.0  # seconds for one request with weights
NCCL_TIMEOUT = 300.0  # seconds to form a group, or to broadcast one weight
HEALTH_TIMEOUT = 10.0  # seconds for the answer to a health check
UNAVAILABLE = (502, 503, 504)  # statuses of a server that is starting or ending
GENERATE = "/inference/v1/generate"
INITIAL_VERSION = "default"  # vLLM's name of the weights that it starts with
LOADING = ".loading"  # suffix of the version while weights are being sent
VERSION_HEADER = "X-Weight-Version"
WEIGHT_HEADER = "X-Weight"  # JSON of `describe_weight`, where the body is bytes of that weight
UPDATE_WEIGHTS = "/update_weights"
# Requests to these routes name a version, so that the weights of two runs are never mixed.
WEIGHT_ROUTES = ("/start_weight_update", UPDATE_WEIGHTS, "/finish_weight_update")
PIECE_BYTES = 1 << 24  # of a weight in one request

Json = dict[str, object]
T = TypeVar("T")


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
        token = secret_of(TOKEN)
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = {url: open_client(url, FLAG, POST_TIMEOUT, self.headers) for url in self.urls}

    def info(self, url: str) -> ServerInfo:
        """What a server is. Raises UserError if it is of another kind, ServerLost if there is none."""
        try:
            answer = self._http[url].get(url + "/run", timeout=HEALTH_TIMEOUT)
        except httpx2.HTTPError as error:
            raise lost(url, f"does not answer: {error or type(error).__name__}") from error
        if answer.status_code in (400, 401, 500, *UNAVAILABLE):
            _check_status(url, answer)
        if answer.status_code == 200:
            with suppress(TypeError, ValueError):  # a server of another kind may answer anything
                return ServerInfo(**answer.json())
        raise UserError(f"{FLAG} {url}: this server takes no weights of a run. Start it with dschat serve-vllm.")

    def post_to_all(
        self, path: str, body: Json | bytes, version: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a request to all servers at once and waits for the answers.

        Args:
            path: route.
            body: content of a JSON request, or raw bytes.
            version: version of the weights that the request belongs to; a server with others refuses it.
            headers: further headers.

        Raises:
            UserError: a server refuses, or another run uses it.
            ServerLost: a server does not answer, or has restarted.
        """
        wait_for_all(self.start_posts(path, [body] * len(self.urls), version, headers))

    def start_posts(
        self,
        path: str,
        bodies: Sequence[Json | bytes],
        version: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> list[Future[None]]:
        """Like `post_to_all`, with a body for each server, but does not wait for the answers."""
        all_headers = dict(headers or {})
        if version is not None:
            all_headers[VERSION_HEADER] = version
        posts = []
        for url, body in zip(self.urls, bodies, strict=True):
            post = partial(self._post, url, path, body, version, all_headers)
            posts.append(in_background(post))
        return posts

    def _post(self, url: str, path: str, body: Json | bytes, version: str | None, headers: Mapping[str, str]) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        all_headers = {**headers, "Content-Type": kind}
        try:
            answer = self._http[url].post(url + path, content=content, headers=all_headers)
        except httpx2.HTTPError as error:
            raise lost(url, f"has gone: {error or type(error).__name__}") from error
        if answer.status_code == 500 and asyncio.run(is_healthy(url)):
            raise _refusal(url, answer)  # of this request; otherwise the engine has died
        if answer.status_code == 409 and version is not None:
            raise other_weights(url, answer.json()["version"], version)
        _check_status(url, answer)

    async def generate(
        self, http: httpx2.AsyncClient, url: str, request: ResponseRequest, version: str
    ) -> VllmResponse:
        """Samples one response. Raises UserError if the server refuses, ServerLost if it or its weights are gone."""
        body: Json = {"token_ids": request.prompt, "sampling_params": request.parameters}
        salted = body | {"cache_salt": version}  # keys and values of other weights are never reused
        content = json.dumps(salted)  # httpx2 would refuse the infinities
        headers = {"Content-Type": "application/json", VERSION_HEADER: version}
        try:
            answer = await http.post(url + GENERATE, content=content, headers=headers)
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


def send_over_http(client: ServerClient, name: str, weight: Tensor, version: str) -> None:
    """Sends a weight as raw bytes, in pieces, and waits until every server has it. Raises UserError or ServerLost."""
    headers = {WEIGHT_HEADER: json.dumps(describe_weight(name, weight))}
    for piece in pieces(weight):
        client.post_to_all(UPDATE_WEIGHTS, piece, version, headers)


class NcclTransport:
    """Broadcasts each weight from the main process, rank 0, to the GPUs of all servers.

    NCCL calls do not return if a server is lost. So they run in threads and on a stream of their own, and what has not
    ended in NCCL_TIMEOUT seconds is aborted: the run can still write a checkpoint.
    """

    def __init__(self, client: ServerClient, run_info: Json, workers: Sequence[int]) -> None:
        """Forms the NCCL group with all servers.

        Args:
            client: the servers.
            run_info: what the servers must know of the run, see `dschat.vllm.worker.RunInfo`.
            workers: number of GPUs of each server.

        Raises:
            UserError, ServerLost: see `ServerClient.post_to_all`.
            OSError, RuntimeError: raised by sockets and by NCCL.
        """
        self._client = client
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        addresses = [local_address(url) for url in client.urls]
        world_size = 1 + sum(workers)
        listening = listening_address(addresses, world_size)
        requests = join_requests(run_info, listening, addresses, workers)

        client.post_to_all("/shutdown_weight_transfer_engine", {})  # ends an earlier group
        # Both sides wait for each other.
        joining = client.start_posts("/init_weight_transfer_engine", requests)
        forming = in_background(partial(self._form_group, listening))
        wait_for_all([forming, *joining], NCCL_TIMEOUT)
        self._group = forming.result()

    def _form_group(self, listening: Json) -> PyNcclCommunicator:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        with torch.cuda.stream(self._stream):  # also selects the GPU in this thread
            return trainer_init(listening)

    def send(self, name: str, weight: Tensor, version: str) -> None:
        """Sends a weight and waits until every server has it. Raises what `__init__` does."""
        update = {**describe_weight(name, weight), "version": version}
        body: Json = {"update_info": update}
        bodies = [body] * len(self._client.urls)
        content = weight.contiguous()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # which has gathered the weight

        receiving = self._client.start_posts(UPDATE_WEIGHTS, bodies, version)
        sending = in_background(partial(self._broadcast, content))
        try:
            wait_for_all([*receiving, sending], NCCL_TIMEOUT)
        except BaseException:
            self._group.destroy()  # aborts the broadcast, so that the GPU is free to write a checkpoint
            raise

    def _broadcast(self, weight: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._group.broadcast(weight, src=0, stream=self._stream)
            if self._stream is not None:
                self._stream.synchronize()


def in_background(action: Callable[[], T]) -> Future[T]:
    """Runs an action in a thread that does not keep the process alive, whatever the action waits for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_for_all(futures: Sequence[Future[T]], timeout: float | None = None) -> None:
    """Waits for all futures, or for the first that fails. Raises its error, or TimeoutError after so many seconds."""
    _, pending = wait(futures, timeout, FIRST_EXCEPTION)
    for future in futures:
        if future.done():
            future.result()
    if pending:
        raise TimeoutError(f"NCCL has not finished in {timeout:g} s")


def pieces(weight: Tensor, size: int = PIECE_BYTES) -> Iterator[bytes]:
    """The bytes of a weight, in pieces of at most `size`."""
    values = weight.detach().cpu().contiguous()
    content = values.flatten().view(torch.uint8)
    for part in content.split(size):
        yield part.numpy().tobytes()


def describe_weight(name: str, weight: Tensor) -> Json:
    """A `dschat.vllm.worker.WeightUpdate` without version and data."""
    return {"name": name, "dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16 or float16."""
    return str(dtype).removeprefix("torch.")


def join_requests(
    run_info: Json, listening: Mapping[str, object], addresses: Sequence[str], workers: Sequence[int]
) -> list[Json | bytes]:
    """One request per server to join the NCCL group. The GPUs of each follow those of the servers before it.

    Args:
        run_info: what the servers must know of the run.
        listening: see `listening_address`.
        addresses: this machine's address as each server reaches it.
        workers: number of GPUs of each server.
    """
    requests: list[Json | bytes] = []
    rank_offset = 1  # rank 0 is the trainer's
    for address, worker_count in zip(addresses, workers, strict=True):
        nccl = {**listening, "master_address": address, "rank_offset": rank_offset}
        requests.append({"init_info": {**run_info, "nccl": nccl}})
        rank_offset += worker_count
    return requests


def local_address(url: str) -> str:
    """This machine's IPv4 address on the route to a server. Raises OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(urlsplit(url).hostname or ""), 9))  # sends nothing
        address: str = probe.getsockname()[0]
    return address


def listening_address(addresses: Sequence[str], world_size: int) -> Json:
    """Where the trainer waits for the other members of the NCCL group, with a free port, as vLLM takes it.

    It listens on all of its addresses if servers reach it by different ones.
    """
    address = addresses[0] if len(set(addresses)) == 1 else "0.0.0.0"
    with socket.socket() as listener:
        listener.bind((address, 0))
        port = listener.getsockname()[1]
    return {"master_address": address, "master_port": port, "world_size": world_size}


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
