# SPDX-License-Identifier: Apache-2.0
"""How the actor's weights reach vLLM servers: one NCCL broadcast to all of their GPUs, or pieces over HTTP."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
from torch import Tensor

from dschat.rollouts.vllm_client import Json, Servers

PIECE = 1 << 24  # bytes of a weight that one request carries


def pieces(name: str, weight: Tensor, size: int = PIECE) -> Iterator[Json]:
    """A weight as bodies of requests of so many bytes at most, see `dschat.rollouts.vllm_worker.SentWeights`."""
    about = sent_weights([WeightShape.of(name, weight)])
    content = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
    for part in content.split(size):
        yield {**about, "data": base64.b64encode(part.numpy().tobytes()).decode()}


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16 or float16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class WeightShape:
    """Of a whole weight."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, weight: Tensor) -> WeightShape:
        """That of a tensor."""
        return cls(name, dtype_name(weight.dtype), tuple(weight.shape))


def sent_weights(shapes: Sequence[WeightShape]) -> Json:
    """What a server must know of weights to take them."""
    return {
        "names": [one.name for one in shapes],
        "dtype_names": [one.dtype for one in shapes],
        "shapes": [list(one.shape) for one in shapes],
    }


class NcclSender:
    """The main process in one NCCL group with all GPUs of the servers. Weights go one by one, so that nobody holds
    more than the largest beside its own share.
    """

    def __init__(self, servers: Servers, introduction: Json, workers: Sequence[int]) -> None:
        """Meets all servers, tells them what they must know of the run, and how many GPUs each has. Raises UserError
        or Lost, see `Servers.post`.
        """
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self._servers, self._pool = servers, ThreadPoolExecutor(1)
        host, port = meeting_place(servers.urls[0])
        meeting = {"master_address": host, "master_port": port, "world_size": 1 + sum(workers)}
        servers.post("/shutdown_weight_transfer_engine", {})  # of a group before
        invited = invitations(introduction, meeting, workers)
        met = self._pool.submit(
            servers.post, "/init_weight_transfer_engine", invited
        )  # both sides wait for each other
        self._stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        try:
            with torch.cuda.stream(self._stream):  # vLLM would put another in its place
                self._group = trainer_init(meeting)
        finally:
            if met.done():
                met.result()  # why nobody came
        met.result()

    def begin(self, shapes: Sequence[WeightShape], version: str) -> None:
        """Lets the servers take weights of these shapes, in their order, under a version."""
        body: Json = {"update_info": {**sent_weights(shapes), "version": version}}
        self._taken = self._pool.submit(self._servers.post, "/update_weights", body, version)

    def send(self, weight: Tensor) -> None:
        """The next of them. Does nothing once a server has gone: nobody would take it."""
        if not self._taken.done():
            self._group.broadcast(weight.contiguous(), src=0, stream=self._stream)

    def finish(self) -> None:
        """Waits until they have been taken. Raises UserError or Lost, see `Servers.post`."""
        self._taken.result()


def invitations(introduction: Json, meeting: Mapping[str, object], workers: Sequence[int]) -> list[Json]:
    """To the group: each server's GPUs follow those of the servers before it; the trainer is rank 0."""
    firsts = [1 + sum(workers[:place]) for place in range(len(workers))]
    return [{"init_info": {**introduction, "nccl": {**meeting, "rank_offset": first}}} for first in firsts]


def meeting_place(url: str) -> tuple[str, int]:
    """This machine's address as a server sees it, and a free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((socket.gethostbyname(urlsplit(url).hostname or ""), 9))  # sends nothing
        own = towards.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((own, 0))
        return own, listener.getsockname()[1]
