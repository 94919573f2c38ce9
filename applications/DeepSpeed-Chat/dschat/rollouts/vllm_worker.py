# SPDX-License-Identifier: Apache-2.0
"""What a vLLM server's workers are taught: to take the weights of one run at a time, and to draw with those alone.

vLLM imports this module by name, see rollouts/serve.py. Who may ask, and with which weights, is decided before that,
in `dschat.rollouts.vllm_gate`.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from dschat.rollouts.vllm_gate import is_of_run
from dschat.rollouts.vllm_weights import Temperature, noting, pack_again, wrong_layers

logger = logging.getLogger(__name__)

BACKEND = "dschat"


@dataclass
class RunInfo:
    """What the worker must know of a run before its weights."""

    run: str  # its name, with which the versions of its weights begin
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
    version: str  # of all weights of this update: the run's name, a dot and a number
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
        self._run = ""
        self._pieces = bytearray()  # of the weight that is on its way by HTTP

    def init_transfer_engine(self, init_info: RunInfo) -> None:
        self._run = init_info.run
        self._temperature.value, self._inputs_first = init_info.temperature, frozenset(init_info.inputs_first)
        self._temperature.missing = torch.tensor(init_info.missing) if init_info.missing else None
        if init_info.nccl:
            super().init_transfer_engine(NCCLWeightTransferInitInfo(**init_info.nccl))

    def start_weight_update(self) -> None:
        self._columns, self._pieces = {}, bytearray()
        super().start_weight_update()

    def receive_weights(self, update_info: SentWeights) -> None:
        """Takes weights, or a piece of one.

        A piece of a run that another has replaced is dropped: it was let in just before. That run's next request is
        refused, see `dschat.rollouts.vllm_gate`. An error here would leave answers of other workers in vLLM's queues.
        """
        if not is_of_run(update_info.version, self._run):
            logger.warning("dropped weights %s of another run than %s", update_info.version, self._run)
            return
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
