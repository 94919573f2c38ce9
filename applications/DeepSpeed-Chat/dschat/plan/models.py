# SPDX-License-Identifier: Apache-2.0
"""The models of a run: their configs, what they keep, what their passes take.

Configs come from a folder, from the hub or, of models that presets name, from the published sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from dschat.base.errors import UserError
from dschat.models.finetuning import Finetuning
from dschat.models.limits import open_decoder_config
from dschat.models.load import reads_both_ways
from dschat.models.lora import adapter_settings, find_adapter
from dschat.models.opening import NAMES, choose_dtype
from dschat.plan.passes import Kind, Model, shape_of
from dschat.plan.states import FLOAT32, Weights, Zero
from dschat.settings.batches import BatchPlan
from dschat.settings.common import CommonConfig
from dschat.settings.deepspeed import deepspeed_settings
from dschat.settings.ppo import PPOConfig
from dschat.settings.refuel import RefuelOnlineConfig
from dschat.settings.supervised import OneModelConfig, RewardConfig

logger = logging.getLogger(__name__)
Configs = Callable[[str, str], PreTrainedConfig]  # (path, flag) → a model's config

GEMMA_2B = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
GEMMA_2B |= {"num_attention_heads": 8, "num_key_value_heads": 1}
GEMMA_7B = {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28}
GEMMA_7B |= {"num_attention_heads": 16, "num_key_value_heads": 16}
GEMMA2_27B = {"hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46}
GEMMA2_27B |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144}
LLAMA3_8B = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA3_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}
LLAMA31_8B = LLAMA3_8B | {"max_position_embeddings": 131_072}
LLAMA31_70B = LLAMA31_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA31_70B |= {"num_attention_heads": 64}
# Hub id → family and the sizes that differ from transformers' defaults, or are written out although they do not.
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
    """A model's config: from a folder, from what was fetched before, of PUBLISHED, or from the hub, in this order.

    Raises:
        UserError: there is none; it names the flag.
    """
    if path not in PUBLISHED or Path(path).exists():
        return open_decoder_config(path, flag)
    try:
        return open_decoder_config(path, flag, local_files_only=True)
    except UserError:
        logger.warning("%s %s was not fetched from the hub before: its sizes are those published.", flag, path)
        return published_config(path)


def published_config(hub_id: str) -> PreTrainedConfig:
    """The config of one of PUBLISHED, as far as its sizes go."""
    family, sizes = PUBLISHED[hub_id]
    options: dict[str, Any] = {"vocab_size": 256_000, **sizes}  # of the Gemmas
    return AutoConfig.for_model(family, **options)


@dataclass(frozen=True)
class Role:
    """A model of a run."""

    name: str  # policy, actor, critic, reference or reward model
    source: str  # what it is loaded from
    model: Model  # its architecture
    weights: Weights  # what decides its states
    recomputed: int = 0  # of every so many layers the first is recomputed in the backward pass; 0 = none is
    compiled: bool = False  # whether its layers are compiled when it trains


def roles_of(config: CommonConfig, batches: BatchPlan, configs: Configs, device: torch.device) -> list[Role]:
    """The models that a run of these flags holds.

    Where no flag says otherwise their dtype is bf16 on GPUs, float32 on CPUs.

    Raises:
        UserError: a config cannot be read, or --deepspeed_config contradicts the flags.
    """
    maker = _Maker(config, batches, configs, choose_dtype(config.engine.dtype, device), device.type == "cuda")
    if isinstance(config, PPOConfig):
        return _ppo_roles(config, maker)
    assert isinstance(config, OneModelConfig)
    base, stage, offload = (
        (config.model.model_name_or_path, "--model_name_or_path"),
        config.engine.zero_stage,
        config.engine.offload,
    )
    rank, again = (
        config.finetuning.lora_dim,
        config.engine.gradient_checkpointing_every * config.engine.gradient_checkpointing,
    )
    if isinstance(config, RewardConfig):
        return [maker.trained("reward model", base, "scalar", stage, rank, again)]
    layers = config.dialogues.trained_layers if isinstance(config, RefuelOnlineConfig) else 0
    roles = [maker.trained("policy", base, "policy", stage, rank, again, layers)]
    if not isinstance(config, RefuelOnlineConfig):
        return roles
    if config.kl.kl_coef and not rank:
        roles.append(maker.frozen("reference", base, "policy", 3 if stage == 3 or offload else 0, offload))
    if config.dialogues.reward_model_name_or_path is not None:
        roles.append(
            maker.plain("reward model", (config.dialogues.reward_model_name_or_path, "--reward_model"), offload)
        )
    return roles


def _ppo_roles(config: PPOConfig, maker: _Maker) -> list[Role]:
    actor = (config.models.actor_model_name_or_path, "--actor_model_name_or_path")
    critic = (
        config.models.critic_model_name_or_path or config.models.actor_model_name_or_path,
        "--critic_model_name_or_path",
    )
    stages, ranks = config.zero_stages, config.lora_ranks
    every = config.engine.gradient_checkpointing_every
    again = every * bool(config.memory.actor_gradient_checkpointing)
    roles = [maker.trained("actor", actor, "policy", stages[0], ranks[0], again)]
    if config.advantages.needs.critic:
        again = every * bool(config.memory.critic_gradient_checkpointing)
        base = actor if config.memory.share_base else critic
        made = maker.trained("critic", base, "scalar", stages[1], ranks[1], again)
        roles.append(_on_base(made, critic[0]) if config.memory.share_base else made)
    sharded = config.memory.actor_zero_stage == 3 or config.memory.offload_reference_model
    frozen = (3 if sharded else 0, config.memory.offload_reference_model)
    if not ranks[0]:  # with LoRA it is the actor with its adapters off
        roles.append(maker.frozen("reference", actor, "policy", *frozen))
    path = config.rewards.reward_model_name_or_path
    if path is None:
        return roles
    named, rank = (path, "--reward_model_name_or_path"), _rank_on_base(config, path)
    if rank is not None:
        made = _on_base(maker.trained("reward model", actor, "scalar", frozen[0], rank, 0), path)
        zero = replace(made.weights.zero, stage=frozen[0])
        roles.append(replace(made, weights=replace(made.weights, trained=0, zero=zero)))
    elif reads_both_ways(maker.configs(*named)):
        roles.append(maker.plain("reward model", named))
    else:
        roles.append(maker.frozen("reward model", named, "scalar", *frozen))
    return roles


def _rank_on_base(config: PPOConfig, reward: str) -> int | None:
    """The rank of a reward model that is an adapter over the actor's base; None of one that is a whole model.

    The critic's is its own start, and need not be there yet.
    """
    if not config.memory.share_base:
        return None
    if reward == config.models.critic_model_name_or_path:
        return config.memory.critic_lora_dim
    folder = find_adapter(reward)
    return None if folder is None else int(adapter_settings(folder)["r"])


def _on_base(role: Role, source: str) -> Role:
    """A role of --share_base: all but its adapters and its head is the actor's."""
    shared = role.weights.parameters - role.weights.trained
    return replace(role, source=source, weights=replace(role.weights, shared=shared))


@dataclass(frozen=True)
class _Maker:
    """Makes roles of a run's flags; a model is given by its path and the flag that names it."""

    config: CommonConfig
    batches: BatchPlan
    configs: Configs
    dtype: torch.dtype
    on_gpu: bool

    def trained(
        self,
        name: str,
        model: tuple[str, str],
        kind: Kind,
        stage: int,
        rank: int,
        recomputed: int,
        top_layers: int = 0,
    ) -> Role:
        """A model under an optimiser."""
        finetuning = Finetuning(**self.config.finetuning.arguments(rank))
        attention = self.config.engine.attn_implementation
        made = Model(self.configs(*model), kind, self.dtype, attention, finetuning, top_layers)
        # In half precision stage 1 takes the place of DeepSpeed's 0.
        used = max(stage, 1) if self.dtype.itemsize < FLOAT32 else stage
        offload, trained = self.config.engine.offload and stage > 0, shape_of(made).trained
        compiled = self.config.compiles(self.on_gpu)
        return Role(name, model[0], made, self._weights(made, used, offload, trained), recomputed, compiled)

    def frozen(self, name: str, model: tuple[str, str], kind: Kind, stage: int, offload: bool) -> Role:
        """A model that never trains, under DeepSpeed."""
        made = Model(self.configs(*model), kind, self.dtype, self.config.engine.attn_implementation)
        return Role(name, model[0], made, self._weights(made, stage, offload, 0))

    def plain(self, name: str, model: tuple[str, str], offload: bool = False) -> Role:
        """A sequence classifier as transformers has it, whole; `offload`: in main memory while it does nothing."""
        config = self.configs(*model)
        made = Model(config, "classifier" if reads_both_ways(config) else "scalar", self.dtype)
        own = shape_of(made)
        zero = Zero(offload_weights=offload)
        return Role(name, model[0], made, Weights(own.parameters, 0, own.largest, self.dtype.itemsize, zero))

    def _weights(self, made: Model, stage: int, offload: bool, trained: int) -> Weights:
        file, own = self.config.engine.deepspeed_config, shape_of(made)
        settings = deepspeed_settings(self.batches, NAMES[self.dtype], stage, offload, file)
        return Weights(own.parameters, trained, own.largest, self.dtype.itemsize, Zero.of(settings, trained > 0))
