# SPDX-License-Identifier: Apache-2.0
"""Extends the workers of a vLLM server: they take the weights of one run at a time and sample with those alone.

vLLM imports this module by name, see serve.py. The gate (gate.py) has checked the sender and the version before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from dschat.vllm.client import is_version_of_run
from dschat.vllm.weights import Temperature, record_columns, repack_weights, wrong_layers

logger = logging.getLogger(__name__)

BACKEND = "dschat"


@dataclass
class RunInfo:
    """What the worker must know of a run before its weights."""

    run: str  # its name, with which the versions of its weights begin
    temperature: float  # of sampling; 1 for greedy decoding
    transposed: list[str]  # names of the matrices stored as (inputs, outputs)
    missing: list[int]  # ids without a token, which are never sampled
    nccl: dict[str, object] = field(default_factory=dict)  # how to join the trainer's group; empty: weights by HTTP


@dataclass
class WeightUpdate:
    """A weight that the trainer broadcasts by NCCL or, with `data`, a piece of one that came by HTTP."""

    name: str
    dtype: str  # in torch's spelling
    shape: list[int]
    version: str  # of all weights of this update, RUN.NUMBER
    data: bytes | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The weight's dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class TrainerWeights(NCCLWeightTransferEngine):
    """Loads a run's weights into vLLM's model, and reports layers that compute with other ones."""

    init_info_cls = RunInfo
    update_info_cls = WeightUpdate

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._temperature = Temperature(model)
        self._transposed = frozenset[str]()
        self._columns: dict[str, Tensor] = {}
        self._run = ""
        self._received = bytearray()  # of the weight that is coming by HTTP

    def init_transfer_engine(self, init_info: RunInfo) -> None:
        """Takes a new run, instead of any other."""
        self._run = init_info.run
        self._temperature.value = init_info.temperature
        self._temperature.missing = torch.tensor(init_info.missing) if init_info.missing else None
        self._transposed = frozenset(init_info.transposed)
        if init_info.nccl:
            super().init_transfer_engine(NCCLWeightTransferInitInfo(**init_info.nccl))

    def start_weight_update(self) -> None:
        """Begins a version of the weights."""
        self._columns = {}
        self._received = bytearray()
        super().start_weight_update()

    def receive_weights(self, update_info: WeightUpdate) -> None:
        """Loads a weight, or stores a piece of one.

        A piece of a run that has just been replaced by another is dropped: the gate refuses that run's next request.
        It raises nothing: after an error of worker 0, vLLM leaves the other workers' answers in its queues, and the
        next request would read them. So restart a server of several GPUs after any other error, here or in
        `finish_weight_update`.
        """
        if not is_version_of_run(update_info.version, self._run):
            logger.warning("dropped weights %s of another run than %s", update_info.version, self._run)
            return
        weight: Tensor | None
        if update_info.data is None:
            weight = self._receive_broadcast(update_info)
        else:
            weight = self._append_piece(update_info, update_info.data)
        if weight is not None:
            named_weight = [(update_info.name, weight)]
            shards = self.parallel_config.tensor_parallel_size
            self.model.load_weights(record_columns(named_weight, self._columns, self._transposed, shards))

    def _receive_broadcast(self, update: WeightUpdate) -> Tensor:
        if self.model_update_group is None:
            raise RuntimeError(f"{update.name} came without bytes, but there is no NCCL group to receive it from")
        weight = torch.empty(update.shape, dtype=update.torch_dtype, device=self.device)
        self.model_update_group.broadcast(weight, src=0, stream=torch.cuda.current_stream())
        return weight

    def _append_piece(self, update: WeightUpdate, piece: bytes) -> Tensor | None:
        """The weight once its last piece is there; until then None."""
        self._received += piece
        elements = torch.Size(update.shape).numel()
        if len(self._received) < elements * update.torch_dtype.itemsize:
            return None
        weight = torch.frombuffer(self._received, dtype=update.torch_dtype)
        self._received = bytearray()
        return weight.view(update.shape).to(self.device)

    def finish_weight_update(self) -> None:
        """Ends a version.

        Raises:
            RuntimeError: a weight is incomplete, or layers compute with other weights than were sent.
        """
        if self._received:
            raise RuntimeError(f"the last weight is incomplete: only {len(self._received)} bytes of it came")
        super().finish_weight_update()
        if self.device.type == "cpu":
            repack_weights(self.model)
        wrong = wrong_layers(self.model, self._columns, self.parallel_config.rank)
        if wrong:
            raise RuntimeError(f"{wrong[0]} computes with other weights than the actor's (wrong layers: {len(wrong)})")


class Extension:
    """Methods added to vLLM's workers. Importing this module for them also registers `TrainerWeights`."""

    get_model: Callable[[], nn.Module]
    _weight_update_active: bool

    def discard_update(self) -> None:
        """Drops what an earlier run has left unfinished: vLLM keeps weights of incomplete layers."""
        self._weight_update_active = False
        for layer in self.get_model().modules():
            layer_info = get_layerwise_info(layer)
            layer_info.loaded_weights = []
            layer_info.load_numel = 0


WeightTransferEngineFactory.register_engine(BACKEND, TrainerWeights)
