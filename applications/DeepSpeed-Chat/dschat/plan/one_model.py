# SPDX-License-Identifier: Apache-2.0
"""The models of steps that train one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dschat.plan.models import ModelPath, Role, RoleBuilder, frozen_stage, recompute_every
from dschat.settings.supervised import OneModelConfig, RewardConfig

if TYPE_CHECKING:
    from dschat.refuel.online_settings import RefuelOnlineConfig


def one_model_roles(config: OneModelConfig, builder: RoleBuilder, top_layers: int = 0) -> list[Role]:
    """The model of steps 1 and 2, DPO and REFUEL, of which the last `top_layers` layers are trained; 0 = all."""
    base = ModelPath(config.model.model_name_or_path, "--model_name_or_path")
    is_reward_model = isinstance(config, RewardConfig)
    trained_model = builder.trained(
        "reward model" if is_reward_model else "policy",
        base,
        "scalar" if is_reward_model else "policy",
        config.engine.zero_stage,
        lora_rank=config.finetuning.lora_dim,
        recompute_every=recompute_every(config, config.engine.gradient_checkpointing),
        top_layers=top_layers,
    )
    return [trained_model]


def refuel_online_roles(config: RefuelOnlineConfig, builder: RoleBuilder) -> list[Role]:
    """The models of online REFUEL: the policy, its reference for the KL, and what scores dialogues.

    With LoRA the reference is the policy with its adapters switched off.
    """
    roles = one_model_roles(config, builder, config.dialogues.trained_layers)
    base = ModelPath(config.model.model_name_or_path, "--model_name_or_path")
    offload = config.engine.offload
    if config.kl.kl_coef and not config.finetuning.lora_dim:
        reference_stage = frozen_stage(config.engine.zero_stage, offload)
        roles.append(builder.frozen("reference", base, "policy", reference_stage, offload))
    reward_path = config.dialogues.reward_model_name_or_path
    if reward_path is not None:
        roles.append(builder.plain("reward model", ModelPath(reward_path, "--reward_model"), offload))
    return roles
