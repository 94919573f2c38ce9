# SPDX-License-Identifier: Apache-2.0
"""The models of step 3, with the sizes that decide how much memory each needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dschat.models.adapters import adapter_settings, find_adapter
from dschat.models.load import is_bidirectional
from dschat.plan.models import ModelPath, Role, RoleBuilder, frozen_stage, recompute_every

if TYPE_CHECKING:
    from dschat.settings.ppo import PPOConfig


def ppo_roles(config: PPOConfig, builder: RoleBuilder) -> list[Role]:
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
            recompute_every=recompute_every(config, config.memory.actor_gradient_checkpointing),
        )
    ]
    if config.advantages.needs.critic:
        roles.append(_critic(config, builder, actor))

    # Frozen models. With LoRA the reference is the actor with its adapters switched off.
    offload = config.memory.offload_reference_model
    stage = frozen_stage(actor_stage, offload)
    if not actor_rank:
        roles.append(builder.frozen("reference", actor, "policy", stage, offload))
    teacher_path = config.teacher.teacher_model_name_or_path
    if teacher_path is not None:
        teacher = ModelPath(teacher_path, "--teacher_model_name_or_path")
        roles.append(builder.frozen("teacher", teacher, "policy", stage, offload))
    reward_path = config.rewards.reward_model_name_or_path
    if reward_path is not None:
        roles.append(_reward_model(config, builder, actor, reward_path, stage))
    return roles


def _critic(config: PPOConfig, builder: RoleBuilder, actor: ModelPath) -> Role:
    """The critic of step 3: a model of its own or, with --share_base, adapters and a head on the actor's base."""
    path = config.models.critic_model_name_or_path or config.models.actor_model_name_or_path
    shares_base = config.memory.share_base
    critic = builder.trained(
        "critic",
        actor if shares_base else ModelPath(path, "--critic_model_name_or_path"),
        "scalar",
        config.memory.critic_zero_stage or 0,
        lora_rank=config.memory.critic_lora_dim or 0,
        recompute_every=recompute_every(config, config.memory.critic_gradient_checkpointing),
        only_mlps=config.critic.critic_trains == "mlp",
    )
    return _on_actor_base(critic, path) if shares_base else critic


def _reward_model(config: PPOConfig, builder: RoleBuilder, actor: ModelPath, path: str, stage: int) -> Role:
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
