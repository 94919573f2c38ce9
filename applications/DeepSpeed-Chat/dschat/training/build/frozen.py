# SPDX-License-Identifier: Apache-2.0
"""What the builders of step 3's models share: names of flags, and settings of models that are not trained."""

from dataclasses import replace

from dschat.engine.deepspeed_config import EngineSettings
from dschat.settings.ppo import PPOConfig
from dschat.training.build.engines import RunPlan, engine_settings

ACTOR = "--actor_model_name_or_path"
CRITIC = "--critic_model_name_or_path"
REWARD = "--reward_model_name_or_path"
TEACHER = "--teacher_model_name_or_path"


def frozen_settings(config: PPOConfig, plan: RunPlan) -> EngineSettings:
    """Settings of reference, reward model and teacher: sharded if the actor is, or if they are in CPU memory."""
    sharded = config.memory.actor_zero_stage == 3 or config.memory.offload_reference_model
    settings = engine_settings(config, plan, False, 3 if sharded else 0)
    return replace(settings, offload=config.memory.offload_reference_model)
