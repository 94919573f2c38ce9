# SPDX-License-Identifier: Apache-2.0
"""From a run's flags to the settings of engines and optimisers."""

from dataclasses import replace

from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig
from dschat.config.ppo import PPOConfig
from dschat.config.refuel import RefuelOnlineConfig
from dschat.config.supervised import SupervisedConfig
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import OptimizerSettings
from dschat.engine.process_group import choose_dtype
from dschat.engine.sharded_loading import placement_of
from dschat.models.placement import Opening


def engine_settings(
    config: CommonConfig, plan: BatchPlan, gradient_checkpointing: bool, zero_stage: int
) -> EngineSettings:
    return EngineSettings(
        dtype=choose_dtype(config.dtype),
        plan=plan,
        zero_stage=zero_stage,
        gradient_checkpointing=gradient_checkpointing,
        offload=config.offload,
        config_file=config.deepspeed_config,
    )


def opening_of(config: CommonConfig, settings: EngineSettings) -> Opening:
    return Opening(placement_of(settings), config.attn_implementation)


def frozen_settings(config: PPOConfig, plan: BatchPlan) -> EngineSettings:
    """Reference and reward model: whole on every rank, or sharded where the actor is or they live in CPU memory."""
    sharded = config.actor_zero_stage == 3 or config.offload_reference_model
    settings = engine_settings(config, plan, False, 3 if sharded else 0)
    return replace(settings, offload=config.offload_reference_model)


def one_optimizer(config: SupervisedConfig | RefuelOnlineConfig, total_updates: int) -> OptimizerSettings:
    """Of a run that trains one model."""
    return optimizer_settings(config, total_updates, config.learning_rate, config.weight_decay)


def optimizer_settings(
    config: CommonConfig, total_updates: int, learning_rate: float, weight_decay: float
) -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        total_updates=total_updates,
        warmup_updates=config.warmup_updates(total_updates),
        schedule=config.lr_scheduler_type,
        gradient_clipping=config.gradient_clipping,
    )
