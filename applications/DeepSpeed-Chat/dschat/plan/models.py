# SPDX-License-Identifier: Apache-2.0
"""The models of a run: their configs, what they keep, what their passes take.

Configs come from a folder, from the hub or, of models that presets name, from the published sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedConfig

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.deepspeed import deepspeed_settings
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelOnlineConfig
from dschat.config.supervised import RewardConfig, SupervisedConfig
from dschat.errors import UserError
from dschat.models.finetuning import EVERYTHING, Finetuning
from dschat.models.limits import open_decoder_config
from dschat.models.load import reads_both_ways
from dschat.models.lora import adapter_settings, find_adapter
from dschat.models.opening import NAMES, SDPA, choose_dtype
from dschat.plan.passes import Head, Kind, Pass, Shape, meta_model, scoring_pass, shape_of, training_pass
from dschat.plan.states import FLOAT32, Weights, Zero

logger = logging.getLogger(__name__)

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
VOCABULARY = 256_000  # of the Gemmas


def find_config(path: str, flag: str) -> PreTrainedConfig:
    """A model's config: from a folder, from what was fetched before, of PUBLISHED, or from the hub, in this order.

    Args:
        path: folder or hub id.
        flag: that named it, for messages.

    Raises:
        UserError: there is none.
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
    options: dict[str, Any] = {"vocab_size": VOCABULARY, **sizes}
    return AutoConfig.for_model(family, **options)


RoleName = Literal["policy", "reward model", "actor", "critic", "reference"]


@dataclass(frozen=True)
class Model:
    """What decides a model's passes; equal models share them."""

    config: PreTrainedConfig = field(compare=False)  # of the model
    key: str  # the config as text
    kind: Kind
    dtype: torch.dtype  # of the parameters
    attention: str  # --attn_implementation
    finetuning: Finetuning = EVERYTHING  # what of it is trained
    top_layers: int = 0  # --trained_layers

    def make(self) -> object:
        """On the meta device."""
        options = self.attention, self.finetuning, self.top_layers
        return meta_model(self.config, self.kind, self.dtype, *options)

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


@lru_cache(maxsize=64)
def shape(model: Model) -> Shape:
    """Its sizes."""
    return shape_of(model.make())


@lru_cache(maxsize=256)
def train_pass(model: Model, rows: int, tokens: int, checkpointing: bool) -> Pass:
    """See `training_pass`."""
    return training_pass(model.make(), rows, tokens, checkpointing)


@lru_cache(maxsize=256)
def score_pass(model: Model, rows: int, tokens: int) -> Pass:
    """See `scoring_pass`."""
    return scoring_pass(model.make(), rows, tokens)


@dataclass(frozen=True)
class Role:
    """A model of a run."""

    name: RoleName  # in the run
    source: str  # what it is loaded from
    model: Model  # its architecture
    weights: Weights  # what decides its states
    checkpointing: bool = False  # gradient checkpointing

    @property
    def head(self) -> Head:
        """Of a policy."""
        own = shape(self.model)
        return Head(own.vocab, own.head, own.tied, own.head_trained, self.model.width, own.capped)


def roles_of(
    config: CommonConfig,
    batches: BatchPlan,
    configs: Callable[[str, str], PreTrainedConfig],
    device: torch.device,
) -> list[Role]:
    """The models that a run holds.

    Args:
        config: the flags.
        batches: its batch sizes.
        configs: (path, flag) → a model's config.
        device: of a process: the dtype is bf16 on GPUs, float32 on CPUs, unless a flag says otherwise.

    Raises:
        UserError: a config cannot be read, or --deepspeed_config contradicts the flags.
    """
    maker = _Maker(config, batches, configs, device)
    if isinstance(config, SupervisedConfig):
        ranks = isinstance(config, RewardConfig)
        name: RoleName = "reward model" if ranks else "policy"
        return [
            maker.trained(
                name,
                ("--model_name_or_path", config.model_name_or_path),
                "scalar" if ranks else "policy",
                config.zero_stage,
                config.lora_dim,
                config.gradient_checkpointing,
            )
        ]
    if isinstance(config, RefuelOnlineConfig):
        return _refuel_roles(config, maker)
    assert isinstance(config, PPOConfig)
    return _ppo_roles(config, maker)


def _refuel_roles(config: RefuelOnlineConfig, maker: _Maker) -> list[Role]:
    base = ("--model_name_or_path", config.model_name_or_path)
    stage, offload, layers = config.zero_stage, config.offload, config.trained_layers
    roles = [maker.trained("policy", base, "policy", stage, config.lora_dim, config.gradient_checkpointing, layers)]
    if config.kl_coef and not config.lora_dim:
        roles.append(maker.frozen("reference", base, "policy", 3 if stage == 3 or offload else 0, offload))
    if config.reward_model_name_or_path is not None:
        roles.append(maker.plain("reward model", ("--reward_model", config.reward_model_name_or_path), offload))
    return roles


def _ppo_roles(config: PPOConfig, maker: _Maker) -> list[Role]:
    actor = ("--actor_model_name_or_path", config.actor_model_name_or_path)
    critic = ("--critic_model_name_or_path", config.critic_model_name_or_path or config.actor_model_name_or_path)
    stages, ranks = config.zero_stages, config.lora_ranks
    roles = [maker.trained("actor", actor, "policy", stages[0], ranks[0], bool(config.actor_gradient_checkpointing))]
    if config.needs.critic:
        again = bool(config.critic_gradient_checkpointing)
        base = actor if config.share_base else critic
        made = maker.trained("critic", base, "scalar", stages[1], ranks[1], again)
        roles.append(on_base(made, critic[1]) if config.share_base else made)
    sharded = config.actor_zero_stage == 3 or config.offload_reference_model
    frozen = (3 if sharded else 0, config.offload_reference_model)
    if not ranks[0]:  # with LoRA it is the actor with its adapters off
        roles.append(maker.frozen("reference", actor, "policy", *frozen))
    path = config.reward_model_name_or_path
    rank = _rank_on_base(config, path)
    if path is not None and rank is not None:
        made = on_base(maker.trained("reward model", actor, "scalar", frozen[0], rank, False), path)
        zero = replace(made.weights.zero, stage=frozen[0])
        roles.append(replace(made, weights=replace(made.weights, trained=0, zero=zero)))
    elif path is not None:
        named = ("--reward_model_name_or_path", path)
        plain = reads_both_ways(maker.config_of(*named))
        roles.append(
            maker.plain("reward model", named) if plain else maker.frozen("reward model", named, "scalar", *frozen)
        )
    return roles


def _rank_on_base(config: PPOConfig, reward: str | None) -> int | None:
    """The rank of a reward model that is an adapter over the actor's base; None of one that is a whole model.

    The critic's is its own start, and need not be there yet.
    """
    if not config.share_base or reward is None:
        return None
    if reward == config.critic_model_name_or_path:
        return config.critic_lora_dim
    folder = find_adapter(reward)
    return None if folder is None else int(adapter_settings(folder)["r"])


def on_base(role: Role, source: str) -> Role:
    """A role of --share_base: all but its adapters and its head is the actor's."""
    shared = role.weights.parameters - role.weights.trained
    return replace(role, source=source, weights=replace(role.weights, shared=shared))


class _Maker:
    """Makes roles of a run's flags."""

    def __init__(
        self,
        config: CommonConfig,
        batches: BatchPlan,
        configs: Callable[[str, str], PreTrainedConfig],
        device: torch.device,
    ) -> None:
        self._config, self._batches, self._configs = config, batches, configs
        self._dtype = choose_dtype(config.dtype, device)
        self._read: dict[str, PreTrainedConfig] = {}

    def trained(
        self,
        name: RoleName,
        model: tuple[str, str],
        kind: Kind,
        stage: int,
        rank: int,
        checkpointing: bool,
        top_layers: int = 0,
    ) -> Role:
        """A model under an optimiser; `model` is the flag and its value."""
        finetuning = Finetuning(*self._config.finetuning(rank))
        made = self._model(model, kind, self._config.attn_implementation, finetuning, top_layers)
        # In half precision stage 1 takes the place of DeepSpeed's 0.
        used = max(stage, 1) if made.width < FLOAT32 else stage
        weights = self._weights(made, used, self._config.offload and stage > 0, shape(made).trained)
        return Role(name, model[1], made, weights, checkpointing)

    def frozen(self, name: RoleName, model: tuple[str, str], kind: Kind, stage: int, offload: bool) -> Role:
        """A model that never trains, under DeepSpeed."""
        made = self._model(model, kind, self._config.attn_implementation)
        return Role(name, model[1], made, self._weights(made, stage, offload, 0))

    def plain(self, name: RoleName, model: tuple[str, str], offload: bool = False) -> Role:
        """A sequence classifier as transformers has it, whole; `offload`: in main memory while it does nothing."""
        kind: Kind = "classifier" if reads_both_ways(self.config_of(*model)) else "scalar"
        made = self._model(model, kind, SDPA)
        own = shape(made)
        zero = Zero(offload_weights=offload)
        return Role(name, model[1], made, Weights(own.parameters, 0, own.largest, made.width, zero))

    def config_of(self, flag: str, path: str) -> PreTrainedConfig:
        """A model's config."""
        if path not in self._read:
            self._read[path] = self._configs(path, flag)
        return self._read[path]

    def _weights(self, made: Model, stage: int, offload: bool, trained: int) -> Weights:
        file, own = self._config.deepspeed_config, shape(made)
        settings = deepspeed_settings(self._batches, NAMES[self._dtype], stage, offload, file)
        return Weights(own.parameters, trained, own.largest, made.width, Zero.of(settings, trained > 0))

    def _model(
        self,
        model: tuple[str, str],
        kind: Kind,
        attention: str,
        finetuning: Finetuning = EVERYTHING,
        top_layers: int = 0,
    ) -> Model:
        config = self.config_of(*model)
        key = config.to_json_string(use_diff=False)
        return Model(config, key, kind, self._dtype, attention, finetuning, top_layers)
