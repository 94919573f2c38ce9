# SPDX-License-Identifier: Apache-2.0
"""From a run's flags to engines and score sources."""

from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from dschat.common.user_function import load_function
from dschat.config.batches import BatchPlan
from dschat.config.common import CommonConfig, SupervisedConfig
from dschat.config.ppo import PPOConfig
from dschat.config.refuel_online import RefuelOnlineConfig
from dschat.engine.adapters_off import AdaptersOff
from dschat.engine.deepspeed_config import EngineSettings
from dschat.engine.engine import Engine, OptimizerSettings, frozen_engine, train_engine
from dschat.engine.process_group import choose_dtype
from dschat.engine.sharded_loading import placement_of
from dschat.models.engines import Policy
from dschat.models.limits import check_length
from dschat.models.load import load_causal_lm, load_classifier, load_scalar
from dschat.models.lora import add_lora
from dschat.models.placement import Opening
from dschat.models.policy import PolicyModel
from dschat.models.scalar import ScalarModel
from dschat.models.tokenizer import end_token_id, load_tokenizer, require_same_tokenizer
from dschat.models.top_layers import train_top_layers
from dschat.rollouts.choice import choose_engine
from dschat.rollouts.engine import RolloutEngine
from dschat.scoring.dialogue_scores import DialogueScores, FunctionDialogueScores, RewardModelDialogueScores
from dschat.scoring.function import FunctionScores
from dschat.scoring.programs.pool import ProgramPool
from dschat.scoring.programs.scores import ProgramScores
from dschat.scoring.reward_model import RewardModelScores
from dschat.scoring.reward_reader import load_reward_tokenizer
from dschat.scoring.source import ScoreSource
from dschat.trainers.ppo.models import PPOModels
from dschat.trainers.refuel.models import RefuelModels

BASE = "--model_name_or_path"
ACTOR, CRITIC, REWARD = "--actor_model_name_or_path", "--critic_model_name_or_path", "--reward_model_name_or_path"


def check_lengths(config: CommonConfig) -> None:
    """Refuses texts longer than a model can read, before anything is loaded. Raises UserError."""
    if isinstance(config, SupervisedConfig):
        check_length(config.model_name_or_path, BASE, config.max_seq_len, "--max_seq_len")
    elif isinstance(config, PPOConfig):
        tokens = config.max_prompt_seq_len + config.max_answer_seq_len
        paths = (
            config.actor_model_name_or_path,
            config.critic_model_name_or_path,
            config.reward_model_name_or_path,
        )
        for flag, path in zip((ACTOR, CRITIC, REWARD), paths, strict=True):
            if path:
                check_length(path, flag, tokens, "--max_prompt_seq_len + --max_answer_seq_len")
    elif isinstance(config, RefuelOnlineConfig):
        check_length(config.model_name_or_path, BASE, config.max_seq_len, "--max_seq_len")


def build_policy(
    config: SupervisedConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, total_updates: int
) -> Engine[PolicyModel]:
    """The engine of step 1 and of DPO."""
    settings = _engine_settings(config, plan, config.gradient_checkpointing, config.zero_stage)
    end_id = end_token_id(tokenizer, config.end_of_conversation_token)
    path, opening = config.model_name_or_path, _opening(config, settings)
    model = load_causal_lm(path, BASE, settings.dtype, tokenizer, end_id, opening)
    if config.lora_dim:
        add_lora(model, config.lora_dim, config.lora_module_name, config.model_name_or_path)
    return train_engine(PolicyModel(model), _one_optimizer(config, total_updates), settings)


def build_reward_model(
    config: SupervisedConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, total_updates: int
) -> Engine[ScalarModel]:
    """The engine of step 2's reward model."""
    settings = _engine_settings(config, plan, config.gradient_checkpointing, config.zero_stage)
    path, opening = config.model_name_or_path, _opening(config, settings)
    model = load_scalar(path, BASE, settings.dtype, tokenizer, opening=opening)
    if config.lora_dim:
        add_lora(model, config.lora_dim, config.lora_module_name, config.model_name_or_path)
    return train_engine(ScalarModel(model), _one_optimizer(config, total_updates), settings)


def load_ppo_tokenizer(config: PPOConfig) -> PreTrainedTokenizerBase:
    """The actor's tokenizer; that of critic and reward model must be the same."""
    tokenizer = load_tokenizer(config.actor_model_name_or_path, ACTOR)
    others = {CRITIC: config.critic_model_name_or_path, REWARD: config.reward_model_name_or_path}
    for flag, path in others.items():
        if path:
            require_same_tokenizer(tokenizer, load_tokenizer(path, flag), ACTOR, flag)
    return tokenizer


def build_ppo_models(
    config: PPOConfig,
    plan: BatchPlan,
    tokenizer: PreTrainedTokenizerBase,
    total_updates: int,
    programs: ProgramPool | None = None,
) -> PPOModels:
    """Actor and reference from the SFT model, critic from the reward model (or the SFT model with a zero head).

    With --advantage_estimator rloo there is no critic.

    Args:
        config: the flags.
        plan: its batch sizes.
        tokenizer: of the run.
        total_updates: for the schedules.
        programs: runs the responses, with --reward_source programs.
    """
    actor = _build_actor(config, plan, tokenizer, total_updates)
    return PPOModels(
        actor=actor,
        reference=_build_reference(config, plan, tokenizer, actor),
        critic=_build_critic(config, plan, tokenizer, total_updates) if config.has_critic else None,
        reward=_reward_source(config, plan, tokenizer, programs),
        rollouts=_rollout_engine(config, actor),
        metric=_function_scores(config.metric_function, "--metric_function") if config.metric_function else None,
        metric_name=config.metric_name or "",
    )


def _build_actor(
    config: PPOConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, total_updates: int
) -> Engine[PolicyModel]:
    settings = _engine_settings(config, plan, config.actor_gradient_checkpointing, config.actor_zero_stage or 0)
    path, end_id = config.actor_model_name_or_path, end_token_id(tokenizer, config.end_of_conversation_token)
    model = load_causal_lm(path, ACTOR, settings.dtype, tokenizer, end_id, _opening(config, settings))
    if config.actor_lora_dim:
        add_lora(model, config.actor_lora_dim, config.lora_module_name, path)
    optimizer = _optimizer(config, total_updates, config.actor_learning_rate, config.actor_weight_decay)
    return train_engine(PolicyModel(model), optimizer, settings)


def _build_reference(
    config: PPOConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, actor: Engine[PolicyModel]
) -> Policy:
    if config.actor_lora_dim:
        return AdaptersOff(actor)
    settings = _frozen_settings(config, plan)
    path, opening = config.actor_model_name_or_path, _opening(config, settings)
    model = load_causal_lm(path, ACTOR, settings.dtype, tokenizer, opening=opening)
    return frozen_engine(PolicyModel(model), settings)


def _build_critic(
    config: PPOConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, total_updates: int
) -> Engine[ScalarModel]:
    settings = _engine_settings(config, plan, config.critic_gradient_checkpointing, config.critic_zero_stage or 0)
    path = config.critic_model_name_or_path or config.actor_model_name_or_path
    opening = _opening(config, settings)
    model = load_scalar(path, CRITIC, settings.dtype, tokenizer, for_this_run=True, opening=opening)
    if config.critic_lora_dim:
        add_lora(model, config.critic_lora_dim, config.lora_module_name, path)
    optimizer = _optimizer(config, total_updates, config.critic_learning_rate, config.critic_weight_decay)
    return train_engine(ScalarModel(model), optimizer, settings)


def build_program_pool(config: PPOConfig) -> ProgramPool:
    """What runs programs; raises UserError where the machine cannot shut them in as asked for."""
    stops_early = config.program_reward == "paper"  # the first error decides its reward
    return ProgramPool(
        config.sandbox_level, config.sandbox_workers, max_tests=config.max_tests, to_the_end=not stops_early
    )


def _reward_source(
    config: PPOConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, programs: ProgramPool | None
) -> ScoreSource:
    if programs is not None:
        return ProgramScores(programs, config.program_reward)
    if config.reward_model_name_or_path is None:
        return _function_scores(config.reward_function or "", "--reward_function")
    settings = _frozen_settings(config, plan)
    path, opening = config.reward_model_name_or_path, _opening(config, settings)
    model = load_scalar(path, REWARD, settings.dtype, tokenizer, may_be_new=False, opening=opening)
    return RewardModelScores(frozen_engine(ScalarModel(model), settings), plan.micro_batch)


def _rollout_engine(config: PPOConfig, actor: Engine[PolicyModel]) -> RolloutEngine:
    """What draws responses."""
    if config.rollout_engine == "vllm":
        from dschat.rollouts.vllm import VllmEngine

        max_tokens = config.max_prompt_seq_len + config.max_answer_seq_len
        return VllmEngine(config.actor_model_name_or_path, max_tokens, config.vllm_gpu_memory)
    rows = config.per_device_generation_batch_size * config.samples_per_prompt
    return choose_engine(config.rollout_engine, rows, actor.module.inner, "--rollout_engine")


def _function_scores(spec: str, flag: str) -> FunctionScores:
    return FunctionScores(load_function(spec, flag), flag)


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
    settings = _engine_settings(config, plan, config.gradient_checkpointing, config.zero_stage)
    settings = replace(settings, offload=config.offload and config.zero_stage > 0)
    path = config.model_name_or_path
    torch.manual_seed(config.seed)  # rows that embeddings grow by are to be the reference's
    model = load_causal_lm(path, BASE, settings.dtype, tokenizer, end_id, _opening(config, settings))
    if config.lora_dim:
        add_lora(model, config.lora_dim, config.lora_module_name, path)
    elif config.trained_layers:
        train_top_layers(model, config.trained_layers, "--trained_layers")
    optimizer = _one_optimizer(config, total_updates)
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
    settings = _engine_settings(config, plan, False, 3 if sharded else 0)
    opening = _opening(config, settings)
    torch.manual_seed(config.seed)  # as for the policy
    model = load_causal_lm(config.model_name_or_path, BASE, settings.dtype, tokenizer, opening=opening)
    return frozen_engine(PolicyModel(model), settings)


def build_dialogue_scores(config: RefuelOnlineConfig, device: torch.device) -> DialogueScores:
    """The source of scores of an online REFUEL run, which computes on a device."""
    path, flag = config.reward_model_name_or_path, "--reward_model"
    if path is None:
        flag = "--reward_function"
        return FunctionDialogueScores(load_function(config.reward_function or "", flag), flag)
    check_length(path, flag, config.max_seq_len, "--max_seq_len")
    tokenizer = load_reward_tokenizer(path, rm_template=False, flag=flag)
    model = load_classifier(path, flag, choose_dtype(config.dtype))
    rows, name = config.per_device_eval_batch_size, f"{flag} {path}"
    return RewardModelDialogueScores(model, tokenizer, name, device, rows, config.offload)


def _engine_settings(
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


def _opening(config: CommonConfig, settings: EngineSettings) -> Opening:
    return Opening(placement_of(settings), config.attn_implementation)


def _frozen_settings(config: PPOConfig, plan: BatchPlan) -> EngineSettings:
    """Reference and reward model: whole on every rank, or sharded where the actor is or they live in CPU memory."""
    sharded = config.actor_zero_stage == 3 or config.offload_reference_model
    settings = _engine_settings(config, plan, False, 3 if sharded else 0)
    return replace(settings, offload=config.offload_reference_model)


def _one_optimizer(config: SupervisedConfig | RefuelOnlineConfig, total_updates: int) -> OptimizerSettings:
    """Of a run that trains one model."""
    return _optimizer(config, total_updates, config.learning_rate, config.weight_decay)


def _optimizer(
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
