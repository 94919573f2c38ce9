# SPDX-License-Identifier: Apache-2.0
"""How the actor's weights reach vLLM servers: one NCCL broadcast to all of their GPUs, or pieces over HTTP."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from dschat.models.engines import TrainedPolicy
from dschat.rollouts.vllm_client import Json, Servers
from dschat.rollouts.vllm_weights import plain_weights
from dschat.run.distributed import is_main, rank

PIECE = 1 << 24  # bytes of a weight that one request carries


def pieces(name: str, weight: Tensor, size: int = PIECE) -> Iterator[Json]:
    """A weight as bodies of requests of so many bytes at most, see `dschat.rollouts.vllm_worker.SentWeights`."""
    about = {"names": [name], "dtype_names": [dtype_name(weight.dtype)], "shapes": [list(weight.shape)]}
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
    dtype: torch.dtype
    shape: tuple[int, ...]


class ActorWeights:
    """The actor as vLLM's weight transfer wants it. Every rank must go through it."""

    def __init__(self, actor: TrainedPolicy) -> None:
        self._actor, self._shapes = actor, list[WeightShape]()

    def metadata(self) -> list[WeightShape]:
        """Names, types and shapes, in the order of the weights. The first time, it goes through them to find out."""
        if not self._shapes:
            weights = plain_weights(self._actor)
            self._shapes = [WeightShape(name, weight.dtype, tuple(weight.shape)) for name, weight in weights]
        return self._shapes

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return plain_weights(self._actor)


class Control:
    """What vLLM's trainer side asks servers to do, on all of them at a time."""

    def __init__(self, servers: Servers, introduction: Json, workers: Sequence[int]) -> None:
        """Takes what servers must know of the run, and how many GPUs each has."""
        self.servers, self._introduction, self.workers = servers, introduction, workers
        self.version = ""  # of the weights that go next

    def init_weight_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """Each server's GPUs follow those of the servers before it in the group; the trainer is its rank 0."""
        firsts = [1 + sum(self.workers[:place]) for place in range(len(self.workers))]
        self.servers.post("/shutdown_weight_transfer_engine", {})  # of a group before
        infos = [self._introduction | {"nccl": {**init_info, "rank_offset": first}} for first in firsts]
        self.servers.post("/init_weight_transfer_engine", [{"init_info": info} for info in infos])

    def start_weight_update(self) -> None:
        """Before the first weight."""
        self.servers.post("/start_weight_update", {})

    def update_weights(self, update_info: Mapping[str, object]) -> None:
        """While they are broadcast."""
        self.servers.post("/update_weights", {"update_info": dict(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """After the last."""
        self.servers.post("/finish_weight_update", {"weight_version": self.version})


class Sender(Protocol):
    """vLLM's trainer side."""

    def send_weights(self) -> None:
        """Sends all weights to all servers. Every rank must call it."""


def nccl_sender(control: Control, weights: ActorWeights) -> Sender:
    """Meets the servers' GPUs. Every rank must call it; only the main process is in the group.

    Weights go one by one, not packed together, so that nobody holds more than the largest beside its own share.
    """
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    host, port = meeting_place(control.servers.urls[0]) if is_main() else ("", 0)
    info = NCCLTrainerInitInfo(host, port, 1 + sum(control.workers), packed=False, rank=rank())
    sender: Sender = WeightTransferTrainerFactory.trainer_init(info, client=control, source=weights)
    return sender


def meeting_place(url: str) -> tuple[str, int]:
    """This machine's address as a server sees it, and a free port."""
    host = urlsplit(url).hostname or ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((socket.gethostbyname(host), 9))  # sends nothing
        own = towards.getsockname()[0]
    with socket.socket() as listener:
        listener.bind((own, 0))
        return own, listener.getsockname()[1]
