# SPDX-License-Identifier: Apache-2.0
"""Step 3: its data, tokenizer, engines and score source; with --share_base see shared_base.py."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat.data.examples import PromptExample, prompt_examples
from dschat.data.notes import RESPONSES_OF_STEPS, warn_of_template
from dschat.engine.engine import Engine, frozen_engine, train_engine
from dschat.models.adapters import find_adapter, lora_config
from dschat.models.classifiers import load_critic
from dschat.models.engines import PolicyEngine
from dschat.models.finetuning import choose_trained
from dschat.models.limits import check_length
from dschat.models.load import load_causal_lm, require_savable
from dschat.models.policy import PolicyModel
from dschat.models.pretrained import open_config
from dschat.models.reward_notes import warn_of_other_end
from dschat.models.scalar import ScalarModel, hint_at_untrained_values
from dschat.models.tokenizer import end_token_id, load_tokenizer, own_end_ids
from dschat.models.vocabulary import require_same_tokenizer
from dschat.rollouts.continuous import Report, choose_engine
from dschat.rollouts.engine import RolloutEngine
from dschat.rollouts.termination import TerminationCondition
from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput
from dschat.settings.ppo import PPOConfig
from dschat.training.loop import loop_of
from dschat.training.ppo.algorithm import PPO
from dschat.training.ppo.collect import ActorSampler
from dschat.training.ppo.models import MovingAverage, PPOModels
from dschat.training.steps.common import load_step_data, plan_run, record_decoding
from dschat.training.steps.engines import RunPlan, engine_settings, load_options_of, optimizer_settings, trained_part
from dschat.training.steps.scores import ProgramRunner, SourceParts, reward_source
from dschat.training.steps.step3 import ACTOR, CRITIC, REWARD, TEACHER, frozen_settings, is_on_base, seed_new_rows

if TYPE_CHECKING:
    from dschat.scoring.function import FunctionScores
    from dschat.scoring.source import ScoreSource

logger = logging.getLogger(__name__)

# Functions of parts that few runs have: imported when a flag asks for them.
CHECK_HEADS = "dschat.vllm.step3:check_heads"
VLLM_ENGINE = "dschat.vllm.step3:build_vllm"
PROGRAM_POOL = "dschat.programs.step3:build_program_pool"
LOAD_PROBLEMS = "dschat.programs.step3:load_problems"
WARN_OF_WAIT = "dschat.turns.step3:warn_of_wait"
OPEN_ENVIRONMENTS = "dschat.turns.step3:open_environments"
LOAD_BINNED = "dschat.models.value_head:load_binned_critic"
VALUE_EXAMPLE = "dschat.models.value_head:value_example"
VALUE_BINS = "macro_actions.value_bins:ValueBins.between"
EPISODE_SAMPLER = "dschat.turns.step3:build_episode_sampler"


def train_ppo(config: PPOConfig, run: RunOutput) -> None:
    """Step 3: PPO with macro actions."""
    check_ppo_lengths(config)
    if config.rewards.reward_function or config.rewards.metric_function:
        from dschat.training.steps.functions import check_functions

        check_functions(config)
    tokenizer = load_ppo_tokenizer(config)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    condition = TerminationCondition(config.termination, tokenizer, end_id, config.optimisation.seed)
    run.record.parser = condition.parser
    programs: ProgramRunner | None = None
    if config.rewards.reward_source == "programs":
        programs = resolve_name(PROGRAM_POOL)(config)
    make = partial(prompt_examples, tokenizer=tokenizer, max_prompt_seq_len=config.sampling.max_prompt_seq_len)
    validate = partial(
        warn_of_template, tokenizer, end_id=end_id, keys=config.columns, responses=RESPONSES_OF_STEPS[3]
    )
    if programs is not None:
        run.record.sandbox = programs.level
        data = resolve_name(LOAD_PROBLEMS)(config, make, programs, validate)
    else:
        data = load_step_data(config, PromptExample, make, validate, reads_prompts=not config.has_episodes)
    plan = plan_run(config, run, data)
    if config.rewards.source_names:
        logger.info("%s", config.rewards.formula)
    warmup = config.optimizers.critic_warmup_updates
    if warmup:
        logger.info("the first %d updates train the critic alone (--critic_warmup_updates)", warmup)
    environments = None
    if config.has_episodes:
        resolve_name(WARN_OF_WAIT)(config, len(data.eval))
        environments = resolve_name(OPEN_ENVIRONMENTS)(config, tokenizer)
    models = build_ppo_models(config, plan, tokenizer, programs, record_decoding(run))
    average = MovingAverage(models.actor) if config.memory.enable_ema else None

    actor_base = config.models.actor_model_name_or_path
    critic_base = config.models.critic_model_name_or_path or actor_base
    saved = [SavedModel(models.actor, "policy", actor_base, "actor")]
    if average is not None:
        role = "policy (moving average)"
        saved.append(SavedModel(models.actor, role, actor_base, "actor_ema", average.whole_weights))
    if models.critic is not None:
        example = None if config.critic.value_range is None else resolve_name(VALUE_EXAMPLE)
        saved.append(SavedModel(models.critic, "critic", critic_base, "critic", example=example))
    average_parts = None if average is None else average.parts
    sampler: ActorSampler | None = None
    if environments is not None:
        sampler = resolve_name(EPISODE_SAMPLER)(config, models, tokenizer, environments)
    algorithm = PPO(models, data.train, data.eval, tokenizer, condition, config, run, average, sampler=sampler)
    loop_of(algorithm, models.trained, saved, tokenizer, config, run, average_parts).fit()


def check_ppo_lengths(config: PPOConfig) -> None:
    """Checks, before anything is loaded, that models can read texts of the lengths that flags allow.

    Raises:
        UserError: a model reads fewer tokens.
    """
    tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
    if config.memory.share_base:
        from dschat.training.steps.shared_base import check_shared_base

        check_shared_base(config)
    if config.vllm.vllm_tensor_parallel > 1:
        resolve_name(CHECK_HEADS)(config)
    # What the reward model reads depends on its tokenizer, see `load_ppo_tokenizer`.
    paths = {ACTOR: config.models.actor_model_name_or_path, CRITIC: config.models.critic_model_name_or_path}
    for flag, path in paths.items():
        if path and not is_on_base(config, path):
            check_length(path, flag, tokens, "--max_prompt_seq_len + --max_answer_seq_len")


def load_ppo_tokenizer(config: PPOConfig) -> PreTrainedTokenizerBase:
    """The actor's tokenizer, with a pad token; the critic's must be the same, the reward model's need not.

    Raises:
        UserError: a tokenizer is missing or unusable, or texts may be longer than the reward model can read.
    """
    end_token = config.data.end_of_conversation_token
    tokenizer = load_tokenizer(config.models.actor_model_name_or_path, ACTOR, end_token=end_token)
    reward = config.rewards.reward_model_name_or_path
    reward_on_base = is_on_base(config, reward)
    paths = {CRITIC: config.models.critic_model_name_or_path, REWARD: reward if reward_on_base else None}
    for flag, path in paths.items():
        # The folder of an adapter alone need not hold a tokenizer.
        if path and (not config.memory.share_base or find_adapter(path) != Path(path)):
            require_same_tokenizer(tokenizer, load_tokenizer(path, flag, end_token=end_token), ACTOR, flag)
    reads_ids = reward_on_base
    if reward and not reward_on_base:
        from dschat.training.steps.reward_reading import own_reward_tokenizer

        reads_ids = own_reward_tokenizer(config, reward, tokenizer) is None
        if reads_ids:
            tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
            check_length(reward, REWARD, tokens, "--max_prompt_seq_len + --max_answer_seq_len")
    if reward and reads_ids:
        warn_of_other_end(open_config(reward, REWARD), end_token or tokenizer.eos_token, f"{REWARD} {reward}")
    teacher = config.teacher.teacher_model_name_or_path
    if teacher is not None:
        from dschat.training.steps.teacher import check_teacher

        check_teacher(config, teacher, tokenizer)
    return tokenizer


def build_ppo_models(
    config: PPOConfig,
    plan: RunPlan,
    tokenizer: PreTrainedTokenizerBase,
    programs: ProgramRunner | None = None,
    report: Report | None = None,
) -> PPOModels:
    """Actor and reference from the SFT model, critic from the reward model (or the SFT model with a zero head).

    There is a critic where --advantage_estimator needs one. `programs` runs the responses, with --reward_source
    programs; `report` is called with how decoding steps are launched.
    """
    settings = engine_settings(
        config,
        plan,
        gradient_checkpointing=bool(config.memory.actor_gradient_checkpointing),
        zero_stage=config.memory.actor_zero_stage or 0,
    )
    path = config.models.actor_model_name_or_path
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    load_options = load_options_of(config, settings)
    seed_new_rows(config, tokenizer)
    model = load_causal_lm(path, ACTOR, settings.dtype, tokenizer, end_id, load_options, own_end_ids(path))
    require_savable(model, f"{ACTOR} {path}")
    critic: PreTrainedModel | None = None
    reward: PreTrainedModel | None = None
    if config.memory.share_base:  # before the actor has adapters
        from dschat.training.steps.shared_base import beside_actor

        critic, reward = beside_actor(config, model)
    finetuning = trained_part(config, config.memory.actor_lora_dim or 0, tokenizer, path, ACTOR)
    choose_trained(model, finetuning, path)
    optimizer = optimizer_settings(
        config,
        plan.updates - config.optimizers.critic_warmup_updates,
        config.optimizers.actor_learning_rate,
        config.optimizers.actor_weight_decay,
    )
    actor = train_engine(PolicyModel(model), optimizer, settings)
    shared: ScoreSource | None = None
    if reward is not None:
        from dschat.training.steps.shared_base import shared_scores

        shared = shared_scores(plan.batches, settings, reward)
    teacher = config.teacher.teacher_model_name_or_path
    metric: FunctionScores | None = None
    if config.rewards.metric_function:
        from dschat.training.steps.functions import function_scores

        metric = function_scores(config.rewards.metric_function, "--metric_function")
    return PPOModels(
        actor=actor,
        reference=_build_reference(config, plan, tokenizer, actor),
        critic=_build_critic(config, plan, tokenizer, critic) if config.advantages.needs.critic else None,
        reward=reward_source(SourceParts(config, plan, tokenizer, programs, shared)),
        rollouts=_rollout_engine(config, actor, tokenizer, report),
        metric=metric,
        metric_name=config.rewards.metric_name or "",
        teacher=None if teacher is None else _frozen_policy(config, plan, tokenizer, teacher, TEACHER),
    )


def _build_reference(
    config: PPOConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, actor: Engine[PolicyModel]
) -> PolicyEngine:
    """The SFT model; with LoRA, the actor without its adapters."""
    if config.memory.actor_lora_dim:
        from dschat.engine.adapters_off import AdaptersOff

        return AdaptersOff(actor)
    seed_new_rows(config, tokenizer)
    return _frozen_policy(config, plan, tokenizer, config.models.actor_model_name_or_path, ACTOR)


def _frozen_policy(
    config: PPOConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, path: str, flag: str
) -> PolicyEngine:
    """The engine of the reference or of the teacher."""
    settings = frozen_settings(config, plan)
    model = load_causal_lm(path, flag, settings.dtype, tokenizer, load_options=load_options_of(config, settings))
    return frozen_engine(PolicyModel(model), settings)


def _build_critic(
    config: PPOConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, shared: PreTrainedModel | None
) -> Engine[ScalarModel]:
    """The engine of the critic; with --share_base, its model is `shared`."""
    settings = engine_settings(
        config,
        replace(plan, batches=config.critic_plan(plan.batches)),
        gradient_checkpointing=bool(config.memory.critic_gradient_checkpointing),
        zero_stage=config.memory.critic_zero_stage or 0,
    )
    path = config.models.critic_model_name_or_path or config.models.actor_model_name_or_path
    if config.models.critic_model_name_or_path is None:
        logger.info("the critic starts from the actor, with a zero value head")
    bins = None
    load: Callable[..., PreTrainedModel] = load_critic
    if config.critic.value_range is not None:
        bins = resolve_name(VALUE_BINS)(*config.critic.value_range)
        load = partial(resolve_name(LOAD_BINNED), bins)
    model = shared
    if model is None:
        model = load(
            path,
            CRITIC,
            settings.dtype,
            tokenizer,
            load_options=load_options_of(config, settings),
            may_grow=config.models.critic_model_name_or_path is None,
        )
    hint_at_untrained_values(model, f"{CRITIC} {path}")
    if lora_config(model) is None:
        finetuning = trained_part(config, config.memory.critic_lora_dim or 0, tokenizer, path, CRITIC)
        finetuning = replace(finetuning, mlps=config.critic.critic_trains == "mlp")
        choose_trained(model, finetuning, path)
    optimizer = optimizer_settings(
        config,
        config.critic_updates(plan.batches, plan.updates),
        config.optimizers.critic_learning_rate,
        config.optimizers.critic_weight_decay,
    )
    return train_engine(ScalarModel(model, bins), optimizer, settings)


def _rollout_engine(
    config: PPOConfig, actor: Engine[PolicyModel], tokenizer: PreTrainedTokenizerBase, report: Report | None = None
) -> RolloutEngine:
    """What samples from the actor: vLLM, or an engine of this process."""
    if config.rollouts.uses_vllm:
        build_engine: Callable[..., RolloutEngine] = resolve_name(VLLM_ENGINE)
        return build_engine(config, actor, tokenizer)
    return choose_engine(
        config.rollouts.rollout_engine,
        config.sampling.per_device_generation_batch_size * config.rollouts.samples_per_prompt,
        actor.module.inner,
        "--rollout_engine",
        config.sampling.decode_graphs,
        report,
    )
