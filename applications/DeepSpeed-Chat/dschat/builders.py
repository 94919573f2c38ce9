# SPDX-License-Identifier: Apache-2.0
"""From a run's flags to engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dschat.common.user_function import load_function
from dschat.config.batches import BatchPlan
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import Engine, OptimizerSettings, frozen_engine, train_engine
from dschat.engine.process_group import choose_dtype
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.lora import AdaptersOff, add_lora
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import end_token_id, load_tokenizer, require_same_tokenizer
from dschat.scoring.function import FunctionScores
from dschat.scoring.reward_model import RewardModelScores
from dschat.trainers.ppo.trainer import PPOModels

BASE = "--model_name_or_path"
ACTOR, CRITIC, REWARD = "--actor_model_name_or_path", "--critic_model_name_or_path", "--reward_model_name_or_path"


def build_policy(config: Any, plan: BatchPlan, tokenizer: Any, total_updates: int) -> Engine:
    """Step 1's engine."""
    settings = _engine_settings(config, plan, config.gradient_checkpointing, config.zero_stage)
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)
    model = load_causal_lm(config.model_name_or_path, BASE, settings.dtype, tokenizer, end_id)
    if config.lora_dim:
        add_lora(model, config.lora_dim, config.lora_module_name, config.model_name_or_path)
    return train_engine(PolicyModel(model), _optimizer_settings(config, total_updates), settings)


def build_reward_model(config: Any, plan: BatchPlan, tokenizer: Any, total_updates: int) -> Engine:
    """Step 2's engine."""
    settings = _engine_settings(config, plan, config.gradient_checkpointing, config.zero_stage)
    model = load_scalar(config.model_name_or_path, BASE, settings.dtype, tokenizer)
    if config.lora_dim:
        add_lora(model, config.lora_dim, config.lora_module_name, config.model_name_or_path)
    return train_engine(ScalarModel(model), _optimizer_settings(config, total_updates), settings)


def load_ppo_tokenizer(config: Any) -> Any:
    """The actor's tokenizer; that of critic and reward model must be the same."""
    tokenizer = load_tokenizer(config.actor_model_name_or_path, ACTOR)
    others = {CRITIC: config.critic_model_name_or_path, REWARD: config.reward_model_name_or_path}
    for flag, path in others.items():
        if path:
            require_same_tokenizer(tokenizer, load_tokenizer(path, flag), ACTOR, flag)
    return tokenizer


def build_ppo_models(config: Any, plan: BatchPlan, tokenizer: Any, total_updates: int) -> PPOModels:
    """Actor and reference from the SFT model, critic from the reward model (or the SFT model with a zero head).

    Args:
        config: PPOConfig.
        plan: its batch sizes.
        tokenizer: of the run.
        total_updates: for the schedules.
    """
    actor_settings = _engine_settings(config, plan, config.actor_gradient_checkpointing, config.actor_zero_stage)
    critic_settings = _engine_settings(config, plan, config.critic_gradient_checkpointing, config.critic_zero_stage)
    frozen_settings = _frozen_settings(config, plan)
    dtype, sft_path = actor_settings.dtype, config.actor_model_name_or_path
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)

    actor_model = load_causal_lm(sft_path, ACTOR, dtype, tokenizer, end_id)
    if config.actor_lora_dim:
        add_lora(actor_model, config.actor_lora_dim, config.lora_module_name, sft_path)
    actor_optimizer = _optimizer_settings(config, total_updates, "actor_")
    actor = train_engine(PolicyModel(actor_model), actor_optimizer, actor_settings)
    reference: Any = AdaptersOff(actor)
    if not config.actor_lora_dim:
        frozen = PolicyModel(load_causal_lm(sft_path, ACTOR, dtype, tokenizer, end_id))
        reference = frozen_engine(frozen, frozen_settings)
    critic_path = config.critic_model_name_or_path or sft_path
    critic = load_scalar(critic_path, CRITIC, dtype, tokenizer)
    if config.critic_lora_dim:
        add_lora(critic, config.critic_lora_dim, config.lora_module_name, critic_path)
    metric = None
    if config.metric_function:
        metric = FunctionScores(load_function(config.metric_function, "--metric_function"), "--metric_function")
    return PPOModels(
        actor=actor,
        reference=reference,
        critic=train_engine(
            ScalarModel(critic), _optimizer_settings(config, total_updates, "critic_"), critic_settings
        ),
        reward=_reward_source(config, frozen_settings, tokenizer),
        metric=metric,
        metric_name=config.metric_name or "",
    )


def _reward_source(config: Any, settings: EngineSettings, tokenizer: Any) -> RewardModelScores | FunctionScores:
    if config.reward_function:
        return FunctionScores(load_function(config.reward_function, "--reward_function"), "--reward_function")
    model = load_scalar(config.reward_model_name_or_path, REWARD, settings.dtype, tokenizer, may_be_new=False)
    batch_size = max(config.per_device_generation_batch_size, config.per_device_eval_batch_size)
    return RewardModelScores(frozen_engine(ScalarModel(model), settings), batch_size)


def _engine_settings(config: Any, plan: BatchPlan, gradient_checkpointing: bool, zero_stage: int) -> EngineSettings:
    return EngineSettings(
        dtype=choose_dtype(config.dtype),
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        zero_stage=zero_stage,
        gradient_checkpointing=gradient_checkpointing,
        offload=config.offload,
        config_file=config.deepspeed_config,
    )


def _frozen_settings(config: Any, plan: BatchPlan) -> EngineSettings:
    """Reference and reward model: whole on every rank, or sharded where the actor is or they live in CPU memory."""
    sharded = config.actor_zero_stage == 3 or config.offload_reference_model
    settings = _engine_settings(config, plan, False, 3 if sharded else 0)
    return replace(settings, offload=config.offload_reference_model)


def _optimizer_settings(config: Any, total_updates: int, role: str = "") -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=getattr(config, f"{role}learning_rate"),
        weight_decay=getattr(config, f"{role}weight_decay"),
        total_updates=total_updates,
        warmup_updates=config.warmup_updates(total_updates),
        schedule=config.lr_scheduler_type,
        gradient_clipping=config.gradient_clipping,
    )
