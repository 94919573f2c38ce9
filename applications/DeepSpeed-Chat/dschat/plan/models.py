# SPDX-License-Identifier: Apache-2.0
"""The models that a run holds in memory, with the sizes that decide how much memory each model needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Literal

import torch
from transformers import PreTrainedConfig

from dschat.models.finetuning import Finetuning
from dschat.models.load import is_bidirectional
from dschat.models.opening import DTYPE_NAMES, choose_dtype
from dschat.plan.sizes import Kind, Model, shape_of
from dschat.plan.states import FLOAT32, Weights, Zero
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.deepspeed import deepspeed_settings

ConfigLoader = Callable[[str, str], PreTrainedConfig]  # (path, flag) → the model's config
RoleName = Literal["policy", "actor", "critic", "reference", "teacher", "reward model"]


@dataclass(frozen=True)
class Role:
    """A model of a run."""

    name: RoleName
    source: str  # the folder or hub id that it is loaded from
    model: Model  # architecture
    weights: Weights  # sizes of weights, gradients and optimiser states
    recompute_every: int = 0  # the backward pass recomputes the first of every N layers; 0 = none
    compiled: bool = False  # its layers are compiled when it trains


@dataclass(frozen=True)
class ModelPath:
    """A model as the command line names it."""

    path: str
    flag: str


def roles_of(config: CommonConfig, batches: BatchPlan, load_config: ConfigLoader, device: torch.device) -> list[Role]:
    """The models that a run with these flags holds.

    Args:
        config: the flags.
        batches: batch sizes of the run.
        load_config: finds the config of a model.
        device: where the run trains; without --dtype, models are bf16 on GPUs and float32 on CPUs.

    Raises:
        UserError: a config cannot be read, or --deepspeed_config sets what flags decide.
    """
    dtype = choose_dtype(config.engine.dtype, device)
    builder = RoleBuilder(config, batches, load_config, dtype, on_gpu=device.type == "cuda")
    list_roles: Callable[[CommonConfig, RoleBuilder], list[Role]] = resolve_name(f"dschat.{config.planned_models}")
    return list_roles(config, builder)


def recompute_every(config: CommonConfig, is_checkpointed: bool | None) -> int:
    """The value of `Role.recompute_every`."""
    return config.engine.gradient_checkpointing_every if is_checkpointed else 0


def frozen_stage(trained_stage: int, offload: bool) -> int:
    """ZeRO stage of a frozen model beside a trained one.

    Stage 3 if the trained model is at stage 3, or if the weights are offloaded, which DeepSpeed does at stage 3 only.
    Otherwise 0: stages 1 and 2 partition only optimiser states and gradients, which a frozen model does not have.
    """
    return 3 if trained_stage == 3 or offload else 0


@dataclass(frozen=True)
class RoleBuilder:
    """Makes roles from a run's flags."""

    config: CommonConfig
    batches: BatchPlan  # batch sizes of the run
    load_config: ConfigLoader  # finds the config of a model
    dtype: torch.dtype  # dtype of the parameters of every model
    on_gpu: bool  # whether the run trains on GPUs, where layers may be compiled

    def trained(
        self,
        name: RoleName,
        base: ModelPath,
        kind: Kind,
        stage: int,
        *,
        lora_rank: int,
        recompute_every: int,
        top_layers: int = 0,
        only_mlps: bool = False,
    ) -> Role:
        """A model with an optimiser.

        Args:
            name: the role.
            base: the model that training starts from.
            kind: what its head computes.
            stage: ZeRO stage that the flags give.
            lora_rank: rank of its adapters; 0 = all weights are trained, or the part that the flags name.
            recompute_every: see `Role`.
            top_layers: train only the last N layers; 0 = all.
            only_mlps: train only the MLPs and the head.
        """
        model = Model(
            config=self.load_config(base.path, base.flag),
            kind=kind,
            dtype=self.dtype,
            attention=self.config.engine.attn_implementation,
            finetuning=Finetuning(**self.config.finetuning.arguments(lora_rank), mlps=only_mlps),
            top_layers=top_layers,
        )
        # `train_engine` replaces stage 0 by stage 1 in half precision: DeepSpeed's stage 0 adds up gradients in bf16.
        stage_in_effect = max(stage, 1) if self.dtype.itemsize < FLOAT32 else stage
        offload = self.config.engine.offload and stage > 0
        weights = self._weights(model, stage_in_effect, offload, shape_of(model).trained)
        compiled = self.config.compiles(self.on_gpu)
        return Role(name, base.path, model, weights, recompute_every, compiled)

    def frozen(self, name: RoleName, base: ModelPath, kind: Kind, stage: int, offload: bool) -> Role:
        """A model without an optimiser, in a DeepSpeed engine.

        Args:
            name: the role.
            base: the model.
            kind: what its head computes.
            stage: ZeRO stage.
            offload: whether its weights are in main memory, which needs stage 3.
        """
        config = self.load_config(base.path, base.flag)
        model = Model(config, kind, self.dtype, self.config.engine.attn_implementation)
        weights = self._weights(model, stage, offload, trained=0)
        return Role(name, base.path, model, weights)

    def plain(self, name: RoleName, base: ModelPath, offload: bool = False) -> Role:
        """A sequence classifier outside DeepSpeed.

        Args:
            name: the role.
            base: the model.
            offload: whether it is in main memory while it is idle.
        """
        config = self.load_config(base.path, base.flag)
        kind: Kind = "classifier" if is_bidirectional(config) else "scalar"
        model = Model(config, kind, self.dtype)
        shape = shape_of(model)
        weights = Weights(
            parameters=shape.parameters,
            trained=0,
            largest=shape.largest,
            width=self.dtype.itemsize,
            zero=Zero(offload_weights=offload),
        )
        return Role(name, base.path, model, weights)

    def _weights(self, model: Model, stage: int, offload: bool, trained: int) -> Weights:
        """Sizes of a model of which `trained` parameters are trained, at a ZeRO stage."""
        shape = shape_of(model)
        file = self.config.engine.deepspeed_config
        settings = deepspeed_settings(self.batches, DTYPE_NAMES[self.dtype], stage, offload, file)
        return Weights(
            parameters=shape.parameters,
            trained=trained,
            largest=shape.largest,
            width=self.dtype.itemsize,
            zero=Zero.of(settings, trained > 0),
        )
