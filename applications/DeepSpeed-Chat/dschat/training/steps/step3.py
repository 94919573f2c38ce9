# SPDX-License-Identifier: Apache-2.0
"""What the builders of step 3's models share: names of flags, settings of frozen models, new rows of embeddings."""

from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from dschat.engine.deepspeed_config import EngineSettings
from dschat.models.pretrained import open_config
from dschat.models.vocabulary import lacks_rows
from dschat.settings.ppo import PPOConfig
from dschat.training.steps.engines import RunPlan, engine_settings

ACTOR = "--actor_model_name_or_path"
CRITIC = "--critic_model_name_or_path"
REWARD = "--reward_model_name_or_path"
TEACHER = "--teacher_model_name_or_path"


def frozen_settings(config: PPOConfig, plan: RunPlan) -> EngineSettings:
    """Settings of reference, reward model and teacher: sharded if the actor is, or if they are in CPU memory."""
    sharded = config.memory.actor_zero_stage == 3 or config.memory.offload_reference_model
    settings = engine_settings(config, plan, False, 3 if sharded else 0)
    return replace(settings, offload=config.memory.offload_reference_model)


def has_new_rows(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the actor's embeddings lack rows for ids of its tokenizer and must grow."""
    return lacks_rows(open_config(config.models.actor_model_name_or_path, ACTOR), tokenizer)


def seed_new_rows(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Seeds torch, so that actor and reference get the same new rows, which change all log-probs."""
    if has_new_rows(config, tokenizer):
        torch.manual_seed(config.optimisation.seed)
