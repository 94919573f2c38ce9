# SPDX-License-Identifier: Apache-2.0
"""How one weight gets from the main process to all vLLM servers: over HTTP, or by an NCCL broadcast.

NCCL is untried: no test has run it between GPUs. It is used where both sides have GPUs and vLLM.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from dschat.rollouts.vllm.client import Json, ServerClient

PIECE_BYTES = 1 << 24  # of a weight in one HTTP request


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
