# SPDX-License-Identifier: Apache-2.0
"""What the builders of step 3's models share: names of flags, settings of frozen models, new rows of embeddings."""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from dschat.base.fingerprints import model_hash
from dschat.engine.deepspeed_config import EngineSettings
from dschat.models.adapters import adapter_settings, find_adapter, is_model, recorded_base
from dschat.models.pretrained import open_config
from dschat.models.vocabulary import lacks_rows
from dschat.scoring.reward_tokenizer import ReaderFlags
from dschat.settings.ppo import PPOConfig
from dschat.training.steps.engines import RunPlan, engine_settings

ACTOR = "--actor_model_name_or_path"
CRITIC = "--critic_model_name_or_path"
REWARD = "--reward_model_name_or_path"
TEACHER = "--teacher_model_name_or_path"
# Flags of step 3, as messages about a reward model's tokenizer and texts name them.
STEP_3_READER_FLAGS = ReaderFlags(
    model=REWARD,
    template="--rm_template",
    shorter="Lower --max_prompt_seq_len or --max_answer_seq_len, or give --on_reward_error skip",
)


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


def is_on_base(config: PPOConfig, path: str | None) -> bool:
    """Whether a model of --share_base is an adapter over the actor's base, and not a whole model of its own."""
    folder = find_adapter(path) if config.memory.share_base else None
    return folder is not None and _is_base(folder, config.models.actor_model_name_or_path)


def _is_base(adapter: Path, actor: str) -> bool:
    """Whether an adapter was trained on the model at ``actor``."""
    recorded = recorded_base(adapter)
    if recorded is not None:
        return is_model(actor, recorded)
    base = str(adapter_settings(adapter).get("base_model_name_or_path"))
    if base == actor or Path(base).resolve() == Path(actor).resolve():
        return True
    both_are_local = Path(base).is_dir() and Path(actor).is_dir()
    return both_are_local and model_hash(base) == model_hash(actor)
