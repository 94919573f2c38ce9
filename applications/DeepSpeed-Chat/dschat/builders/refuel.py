# SPDX-License-Identifier: Apache-2.0
"""The engines of an online REFUEL run."""

from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from dschat.builders.names import BASE
from dschat.builders.settings import engine_settings, one_optimizer, opening_of
from dschat.config.batches import BatchPlan
from dschat.config.refuel import RefuelOnlineConfig
from dschat.engine.adapters_off import AdaptersOff
from dschat.engine.engine import Engine, frozen_engine, train_engine
from dschat.models.engines import Policy
from dschat.models.finetuning import Finetuning, choose_trained, train_top_layers
from dschat.models.load import load_causal_lm
from dschat.models.policy import PolicyModel
from dschat.rollouts.choice import choose_engine
from dschat.scoring.dialogue_scores import DialogueScores
from dschat.trainers.refuel.models import RefuelModels


def build_refuel_models(
    config: RefuelOnlineConfig,
    plan: BatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    total_updates: int,
    reward: DialogueScores,
) -> RefuelModels:
    """The policy, and its frozen start as the reference where the reward depends on it.

    Args:
        config: the flags.
        plan: its batch sizes.
        tokenizer: of the run.
        end_id: ends a reply.
        total_updates: for the schedule.
        reward: from `build_dialogue_scores`.
    """
    settings = engine_settings(config, plan, config.gradient_checkpointing, config.zero_stage)
    settings = replace(settings, offload=config.offload and config.zero_stage > 0)
    path = config.model_name_or_path
    torch.manual_seed(config.seed)  # rows that embeddings grow by are to be the reference's
    model = load_causal_lm(path, BASE, settings.dtype, tokenizer, end_id, opening_of(config, settings))
    choose_trained(model, Finetuning(*config.finetuning(config.lora_dim)), path)
    if config.trained_layers:
        train_top_layers(model, config.trained_layers, "--trained_layers")
    optimizer = one_optimizer(config, total_updates)
    policy = train_engine(PolicyModel(model), replace(optimizer, epsilon=config.adam_epsilon), settings)
    rows = config.per_device_generation_batch_size
    engine = choose_engine(config.rollout_engine, rows, policy.module.inner, "--rollout_engine")
    return RefuelModels(policy, _refuel_reference(config, plan, tokenizer, policy), reward, engine)


def _refuel_reference(
    config: RefuelOnlineConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, policy: Engine[PolicyModel]
) -> Policy | None:
    if config.kl_coef == 0:
        return None
    if config.lora_dim:
        return AdaptersOff(policy)
    sharded = config.zero_stage == 3 or config.offload
    settings = engine_settings(config, plan, False, 3 if sharded else 0)
    opening = opening_of(config, settings)
    torch.manual_seed(config.seed)  # as for the policy
    model = load_causal_lm(config.model_name_or_path, BASE, settings.dtype, tokenizer, opening=opening)
    return frozen_engine(PolicyModel(model), settings)
