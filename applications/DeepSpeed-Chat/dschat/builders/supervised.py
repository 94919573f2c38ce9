# SPDX-License-Identifier: Apache-2.0
"""The engines of steps 1 and 2."""

from transformers import PreTrainedTokenizerBase

from dschat.builders.names import BASE
from dschat.builders.settings import engine_settings, one_optimizer, opening_of
from dschat.config.batches import BatchPlan
from dschat.config.supervised import RewardConfig, SupervisedConfig
from dschat.engine.engine import Engine, train_engine
from dschat.models.finetuning import Finetuning, choose_trained
from dschat.models.gain import add_gain
from dschat.models.load import load_causal_lm, load_scalar
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.scored_at import note_reward_loss
from dschat.models.tokenizer import end_token_id


def build_policy(
    config: SupervisedConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, total_updates: int
) -> Engine[PolicyModel]:
    """The engine of step 1 and of DPO."""
    settings = engine_settings(config, plan, config.gradient_checkpointing, config.zero_stage)
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)
    path, opening = config.model_name_or_path, opening_of(config, settings)
    model = load_causal_lm(path, BASE, settings.dtype, tokenizer, end_id, opening)
    choose_trained(model, Finetuning(*config.finetuning(config.lora_dim)), path)
    return train_engine(PolicyModel(model), one_optimizer(config, total_updates), settings)


def build_reward_model(
    config: RewardConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, total_updates: int
) -> Engine[ScalarModel]:
    """The engine of step 2's reward model."""
    settings = engine_settings(config, plan, config.gradient_checkpointing, config.zero_stage)
    path, opening = config.model_name_or_path, opening_of(config, settings)
    model = load_scalar(path, BASE, settings.dtype, tokenizer, opening=opening)
    note_reward_loss(model, config.reward_loss)
    if config.reward_gain:
        add_gain(model.score)
    choose_trained(model, Finetuning(*config.finetuning(config.lora_dim)), path)
    return train_engine(ScalarModel(model), one_optimizer(config, total_updates), settings)
