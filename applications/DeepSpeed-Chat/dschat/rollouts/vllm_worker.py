# SPDX-License-Identifier: Apache-2.0
"""What a vLLM server is taught: to take a run's weights, to draw with those alone, and to know who may ask.

vLLM imports this module by name, see rollouts/serve.py: `Extension` in each worker, `Gate` where requests arrive.
"""

from __future__ import annotations

import base64
import hmac
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from dschat.rollouts.vllm_weights import Temperature, noting, pack_again, wrong_layers

BACKEND = "dschat"
ABOUT, GENERATE, OPEN = "/run", "/inference/v1/generate", "/health"


@dataclass
class RunInfo:
    """What the worker must know of a run before its weights."""

    temperature: float  # of its draws; 1 for greedy ones
    inputs_first: list[str]  # names of the matrices that are (inputs, outputs)
    missing: list[int]  # ids that are no tokens, and are never drawn
    nccl: dict[str, object] = field(default_factory=dict)  # how to meet the trainer; empty: weights come by HTTP


@dataclass
class SentWeights:
    """Weights by NCCL, all of them; or, with data, a piece of one weight."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    data: str | None = None  # base64


class TrainerWeights(NCCLWeightTransferEngine):
    """Takes a run's weights, and says which layers compute with other ones."""

    init_info_cls = RunInfo
    update_info_cls = SentWeights

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._temperature, self._inputs_first = Temperature(model), frozenset[str]()
        self._columns: dict[str, Tensor] = {}
        self._pieces = bytearray()  # of the weight that is on its way by HTTP

    def init_transfer_engine(self, init_info: RunInfo) -> None:
        self._temperature.value, self._inputs_first = init_info.temperature, frozenset(init_info.inputs_first)
        self._temperature.missing = torch.tensor(init_info.missing) if init_info.missing else None
        if init_info.nccl:
            super().init_transfer_engine(NCCLWeightTransferInitInfo(**init_info.nccl))

    def start_weight_update(self) -> None:
        self._columns, self._pieces = {}, bytearray()
        super().start_weight_update()

    def receive_weights(self, update_info: SentWeights) -> None:
        weights = self._broadcast(update_info) if update_info.data is None else self._completed(update_info)
        for weight in noting(weights, self._columns, self._inputs_first, self.parallel_config.tensor_parallel_size):
            self.model.load_weights([weight])

    def _broadcast(self, info: SentWeights) -> Iterable[tuple[str, Tensor]]:
        assert self.model_update_group is not None  # the trainer has made it
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.model_update_group.broadcast(weight, src=0, stream=torch.cuda.current_stream())
            yield name, weight

    def _completed(self, info: SentWeights) -> Iterable[tuple[str, Tensor]]:
        """The weight whose last piece has come."""
        dtype, shape = getattr(torch, info.dtype_names[0]), info.shapes[0]
        self._pieces += base64.b64decode(info.data or "")
        if len(self._pieces) == dtype.itemsize * torch.Size(shape).numel():
            whole, self._pieces = self._pieces, bytearray()
            yield info.names[0], torch.frombuffer(whole, dtype=dtype).view(shape).to(self.device)

    def finish_weight_update(self) -> None:
        """After the last weight. Raises RuntimeError where a layer computes with other weights than it was given."""
        super().finish_weight_update()
        if self.device.type == "cpu":
            pack_again(self.model)
        wrong = wrong_layers(self.model, self._columns, self.parallel_config.rank)
        if wrong:
            raise RuntimeError(f"{wrong[0]} computes with other weights than the actor's")


class Extension:
    """What vLLM's workers take on. For it they import this module, in time for what follows."""

    get_model: Callable[[], nn.Module]
    _weight_update_active: bool

    def forget_update(self) -> None:
        """What a run has left unfinished: vLLM keeps weights of layers that are not complete."""
        self._weight_update_active = False
        for layer in self.get_model().modules():
            unfinished = get_layerwise_info(layer)
            unfinished.loaded_weights, unfinished.load_numel = [], 0


WeightTransferEngineFactory.register_engine(BACKEND, TrainerWeights)


class Gate:
    """ASGI middleware in front of all of vLLM's routes.

    It lets nobody in without the token of VLLM_API_KEY, if there is one: vLLM itself guards some of its routes only.
    It refuses to draw with other weights than a request names, and tells a run what the server is.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._token = app, os.environ.get("VLLM_API_KEY", "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(Request(scope)) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    async def _answer(self, request: Request) -> JSONResponse | None:
        """None where vLLM is to answer."""
        path, engine = request.url.path, request.app.state.engine_client
        if path == OPEN:
            return None
        given = request.headers.get("authorization", "")
        if self._token and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return JSONResponse({"error": "the token is missing or wrong"}, 401)
        if path not in (ABOUT, GENERATE):
            return None
        if engine.errored:
            return JSONResponse({"error": "the engine has died"}, 503)
        version = await engine.get_weight_version()
        if path == ABOUT:
            return JSONResponse(about(engine.vllm_config) | {"version": version})
        is_wanted = request.headers.get("x-weight-version") == version
        return None if is_wanted else JSONResponse({"version": version}, 409)


def about(config: VllmConfig) -> dict[str, object]:
    """What a server says of itself, see `dschat.rollouts.vllm_client.About`."""
    return {
        "backend": config.weight_transfer_config.backend,
        "device": config.device_config.device_type,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "vocabulary": config.model_config.get_vocab_size(),
        "max_tokens": config.model_config.max_model_len,
        "workers": config.parallel_config.world_size,
    }
