# SPDX-License-Identifier: Apache-2.0
"""The models that a run holds in memory, with the sizes that decide how much memory each model needs.

`roles_of` lists the models. Their configs come from folders or from the hub. PUBLISHED holds the sizes of the models
that presets name, so that a preset can be planned without a network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedConfig

from dschat.base.errors import UserError
from dschat.models.finetuning import Finetuning
from dschat.models.limits import open_decoder_config
from dschat.models.load import is_bidirectional
from dschat.models.lora import adapter_settings, find_adapter
from dschat.models.opening import DTYPE_NAMES, choose_dtype
from dschat.plan.passes import Kind, Model, shape_of
from dschat.plan.states import FLOAT32, Weights, Zero
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.deepspeed import deepspeed_settings
from dschat.settings.ppo import PPOConfig
from dschat.settings.refuel import RefuelOnlineConfig
from dschat.settings.supervised import OneModelConfig, RewardConfig

logger = logging.getLogger(__name__)
ConfigLoader = Callable[[str, str], PreTrainedConfig]  # (path, flag) → the model's config
RoleName = Literal["policy", "actor", "critic", "reference", "teacher", "reward model"]

GEMMA_2B = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
GEMMA_7B = {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
GEMMA2_27B = {
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 144,
}
LLAMA3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
LLAMA31_8B = {**LLAMA3_8B, "max_position_embeddings": 131_072}
LLAMA31_70B = {
    **LLAMA31_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
GEMMA_VOCABULARY = 256_000
# Hub id → model family of transformers, and sizes of the config; without a vocab_size it is GEMMA_VOCABULARY.
PUBLISHED: dict[str, tuple[str, Mapping[str, int]]] = {
    "google/gemma-2b": ("gemma", GEMMA_2B),
    "google/gemma-7b": ("gemma", GEMMA_7B),
    "google/codegemma-2b": ("gemma", GEMMA_2B),
    "google/codegemma-7b-it": ("gemma", GEMMA_7B),
    "google/gemma-2-27b": ("gemma2", GEMMA2_27B),
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama", LLAMA3_8B),
    "meta-llama/Llama-3.1-8B": ("llama", LLAMA31_8B),
    "meta-llama/Llama-3.1-70B": ("llama", LLAMA31_70B),
    "sfairXC/FsfairX-LLaMA3-RM-v0.1": ("llama", LLAMA3_8B),
}


def find_config(path: str, flag: str) -> PreTrainedConfig:
    """Returns a model's config.

    The config of a hub model in PUBLISHED is read from the hub's local cache, or else made from the published sizes;
    the network is not used. Any other config is read from its folder or the hub.

    Raises:
        UserError: there is no config; the message names the flag.
    """
    if path not in PUBLISHED or Path(path).exists():
        return open_decoder_config(path, flag)
    try:
        return open_decoder_config(path, flag, local_files_only=True)
    except UserError:
        logger.warning(
            "%s %s: the hub's local cache holds no readable config, so the plan uses the published sizes.",
            flag,
            path,
        )
        return published_config(path)


def published_config(hub_id: str) -> PreTrainedConfig:
    """The config of a model in PUBLISHED; only its sizes are meaningful."""
    family, sizes = PUBLISHED[hub_id]
    options: dict[str, Any] = {"vocab_size": GEMMA_VOCABULARY, **sizes}
    return AutoConfig.for_model(family, **options)


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


def roles_of(
    config: CommonConfig,
    batches: BatchPlan,
    load_config: ConfigLoader,
    device: torch.device,
) -> list[Role]:
    """The models that a run with these flags holds.

    Args:
        config: the flags.
        batches: batch sizes of the run.
        load_config: finds the config of a model.
        device: where the run trains; without --dtype, models are bf16 on GPUs and float32 on CPUs.

    Raises:
        UserError: a config cannot be read, or --deepspeed_config contradicts the flags.
    """
    dtype = choose_dtype(config.engine.dtype, device)
    builder = RoleBuilder(config, batches, load_config, dtype, on_gpu=device.type == "cuda")
    if isinstance(config, PPOConfig):
        return _ppo_roles(config, builder)
    assert isinstance(config, OneModelConfig)
    return _one_model_roles(config, builder)


def _one_model_roles(config: OneModelConfig, builder: RoleBuilder) -> list[Role]:
    """The models of steps 1 and 2, DPO and REFUEL: the trained one, and for online REFUEL those that score."""
    base = ModelPath(config.model.model_name_or_path, "--model_name_or_path")
    is_reward_model = isinstance(config, RewardConfig)
    trained_model = builder.trained(
        "reward model" if is_reward_model else "policy",
        base,
        "scalar" if is_reward_model else "policy",
        config.engine.zero_stage,
        lora_rank=config.finetuning.lora_dim,
        recompute_every=_recompute_every(config, config.engine.gradient_checkpointing),
        top_layers=config.dialogues.trained_layers if isinstance(config, RefuelOnlineConfig) else 0,
    )
    roles = [trained_model]
    if not isinstance(config, RefuelOnlineConfig):
        return roles

    # Online REFUEL also computes the KL to a reference, and scores dialogues. With LoRA the reference is the policy
    # with its adapters switched off.
    offload = config.engine.offload
    if config.kl.kl_coef and not config.finetuning.lora_dim:
        reference_stage = _frozen_stage(config.engine.zero_stage, offload)
        roles.append(builder.frozen("reference", base, "policy", reference_stage, offload))
    reward_path = config.dialogues.reward_model_name_or_path
    if reward_path is not None:
        roles.append(builder.plain("reward model", ModelPath(reward_path, "--reward_model"), offload))
    return roles


def _ppo_roles(config: PPOConfig, builder: RoleBuilder) -> list[Role]:
    """The models of step 3: actor, critic, reference, teacher and reward model, as far as the run has them."""
    actor_stage = config.memory.actor_zero_stage or 0
    actor_rank = config.memory.actor_lora_dim or 0
    actor = ModelPath(config.models.actor_model_name_or_path, "--actor_model_name_or_path")
    roles = [
        builder.trained(
            "actor",
            actor,
            "policy",
            actor_stage,
            lora_rank=actor_rank,
            recompute_every=_recompute_every(config, config.memory.actor_gradient_checkpointing),
        )
    ]
    if config.advantages.needs.critic:
        roles.append(_critic(config, builder, actor))

    # Frozen models. With LoRA the reference is the actor with its adapters switched off.
    offload = config.memory.offload_reference_model
    frozen_stage = _frozen_stage(actor_stage, offload)
    if not actor_rank:
        roles.append(builder.frozen("reference", actor, "policy", frozen_stage, offload))
    teacher_path = config.teacher.teacher_model_name_or_path
    if teacher_path is not None:
        teacher = ModelPath(teacher_path, "--teacher_model_name_or_path")
        roles.append(builder.frozen("teacher", teacher, "policy", frozen_stage, offload))
    reward_path = config.rewards.reward_model_name_or_path
    if reward_path is not None:
        roles.append(_reward_model(config, builder, actor, reward_path, frozen_stage))
    return roles


def _recompute_every(config: CommonConfig, is_checkpointed: bool | None) -> int:
    """The value of `Role.recompute_every`."""
    return config.engine.gradient_checkpointing_every if is_checkpointed else 0


def _frozen_stage(trained_stage: int, offload: bool) -> int:
    """ZeRO stage of a frozen model beside a trained one.

    Stage 3 if the trained model is at stage 3, or if the weights are offloaded, which DeepSpeed does at stage 3 only.
    Otherwise 0: stages 1 and 2 partition only optimiser states and gradients, which a frozen model does not have.
    """
    return 3 if trained_stage == 3 or offload else 0


def _critic(
    config: PPOConfig,
    builder: RoleBuilder,
    actor: ModelPath,
) -> Role:
    """The critic of step 3: a model of its own or, with --share_base, adapters and a head on the actor's base."""
    path = config.models.critic_model_name_or_path or config.models.actor_model_name_or_path
    shares_base = config.memory.share_base
    critic = builder.trained(
        "critic",
        actor if shares_base else ModelPath(path, "--critic_model_name_or_path"),
        "scalar",
        config.memory.critic_zero_stage or 0,
        lora_rank=config.memory.critic_lora_dim or 0,
        recompute_every=_recompute_every(config, config.memory.critic_gradient_checkpointing),
    )
    return _on_actor_base(critic, path) if shares_base else critic


def _reward_model(
    config: PPOConfig,
    builder: RoleBuilder,
    actor: ModelPath,
    path: str,
    stage: int,
) -> Role:
    """The reward model of step 3: adapters on the actor's base, a bidirectional classifier or a whole scalar model."""
    rank = _rank_on_actor_base(config, path)
    if rank is not None:
        # `trained` adds the adapters and counts them and the head apart from the base, which is the actor's.
        adapter = builder.trained("reward model", actor, "scalar", stage, lora_rank=rank, recompute_every=0)
        role = _on_actor_base(adapter, path)
        # Then frozen: it has no gradients, and keeps stage 0 in half precision, too.
        frozen_zero = replace(role.weights.zero, stage=stage)
        frozen_weights = replace(role.weights, trained=0, zero=frozen_zero)
        return replace(role, weights=frozen_weights)
    reward = ModelPath(path, "--reward_model_name_or_path")
    if is_bidirectional(builder.load_config(reward.path, reward.flag)):
        return builder.plain("reward model", reward)
    return builder.frozen("reward model", reward, "scalar", stage, config.memory.offload_reference_model)


def _rank_on_actor_base(config: PPOConfig, reward: str) -> int | None:
    """The LoRA rank of a reward model that is an adapter on the actor's base; None for a whole model.

    A reward model from which the critic starts as well may not exist yet when the run is planned; its rank is that of
    the critic.
    """
    if not config.memory.share_base:
        return None
    if reward == config.models.critic_model_name_or_path:
        return config.memory.critic_lora_dim
    folder = find_adapter(reward)
    return None if folder is None else int(adapter_settings(folder)["r"])


def _on_actor_base(role: Role, source: str) -> Role:
    """The role with --share_base: all its weights except adapters and head are the actor's."""
    shared = role.weights.parameters - role.weights.trained
    return replace(role, source=source, weights=replace(role.weights, shared=shared))


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
        """
        model = Model(
            config=self.load_config(base.path, base.flag),
            kind=kind,
            dtype=self.dtype,
            attention=self.config.engine.attn_implementation,
            finetuning=Finetuning(**self.config.finetuning.arguments(lora_rank)),
            top_layers=top_layers,
        )
        # `train_engine` replaces stage 0 by stage 1 in half precision: DeepSpeed's stage 0 adds up gradients in bf16.
        stage_in_effect = max(stage, 1) if self.dtype.itemsize < FLOAT32 else stage
        offload = self.config.engine.offload and stage > 0
        weights = self._weights(model, stage_in_effect, offload, shape_of(model).trained)
        compiled = self.config.compiles(self.on_gpu)
        return Role(name, base.path, model, weights, recompute_every, compiled)

    def frozen(
        self,
        name: RoleName,
        base: ModelPath,
        kind: Kind,
        stage: int,
        offload: bool,
    ) -> Role:
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

    def plain(
        self,
        name: RoleName,
        base: ModelPath,
        offload: bool = False,
    ) -> Role:
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

    def _weights(
        self,
        model: Model,
        stage: int,
        offload: bool,
        trained: int,
    ) -> Weights:
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
