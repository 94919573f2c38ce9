# SPDX-License-Identifier: Apache-2.0
"""Step 3: its data, tokenizer, engines and score source; with --share_base see shared_base.py."""

import logging
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.data.examples import PromptExample, prompt_examples
from dschat.data.messages import TOOLS
from dschat.data.observations import ConversationEncoder
from dschat.data.template_notes import RESPONSES_OF_STEPS, warn_of_template
from dschat.engine.engine import AdaptersOff, Engine, frozen_engine, train_engine
from dschat.models.engines import PolicyEngine
from dschat.models.finetuning import choose_trained
from dschat.models.limits import check_length
from dschat.models.load import load_causal_lm, load_critic, require_savable
from dschat.models.lora import find_adapter, lora_config
from dschat.models.policy import PolicyModel
from dschat.models.pretrained import open_config
from dschat.models.reward_notes import warn_of_other_end
from dschat.models.scalar import ScalarModel, hint_at_untrained_values
from dschat.models.tokenizer import (
    end_token_id,
    load_tokenizer,
    own_end_ids,
    require_same_tokenizer,
    same_ids,
    vocabulary_difference,
)
from dschat.models.vocabulary import id_count, lacks_rows, row_count
from dschat.rollouts.engine import RolloutEngine
from dschat.rollouts.environments import EnvironmentPool
from dschat.rollouts.episodes import EpisodeLimits, EpisodePlayer, all_columns
from dschat.rollouts.generate import Report, choose_engine
from dschat.rollouts.simulated_user import UserServer, UserSettings, prompt_columns
from dschat.rollouts.termination import TerminationCondition
from dschat.rollouts.vllm.engine import VllmEngine
from dschat.rollouts.vllm.servers import ServerNeeds, VllmServers
from dschat.run.distributed import is_main, world_size
from dschat.run.model_folders import SavedModel
from dschat.run.output import RunOutput
from dschat.scoring.function import FunctionScores
from dschat.scoring.programs.run import ProgramPool
from dschat.settings.episodes import longest_wait
from dschat.settings.ppo import PPOConfig
from dschat.training.build.engines import (
    RunPlan,
    engine_settings,
    load_options_of,
    optimizer_settings,
    trained_part,
)
from dschat.training.build.frozen import ACTOR, CRITIC, REWARD, TEACHER, frozen_settings
from dschat.training.build.problems import load_problems
from dschat.training.build.scores import (
    build_program_pool,
    check_functions,
    function_scores,
    own_reward_tokenizer,
    reward_source,
)
from dschat.training.build.shared_base import beside_actor, check_shared_base, is_on_base, shared_scores
from dschat.training.build.steps import load_step_data, plan_run, record_decoding
from dschat.training.loop import loop_of
from dschat.training.ppo.algorithm import PPO
from dschat.training.ppo.collect import build_actor_sampler
from dschat.training.ppo.episodes import EpisodeSampler
from dschat.training.ppo.models import MovingAverage, PPOModels

logger = logging.getLogger(__name__)

USER_CACHE = ".user-cache"  # answers of the simulated user's server, below the output folder


def train_ppo(config: PPOConfig, run: RunOutput) -> None:
    """Step 3: PPO with macro actions."""
    check_ppo_lengths(config)
    check_functions(config)
    tokenizer = load_ppo_tokenizer(config)
    end_id = end_token_id(tokenizer, config.data.end_of_conversation_token)
    condition = TerminationCondition(config.termination, tokenizer, end_id, config.optimisation.seed)
    run.record.parser = condition.parser
    programs: ProgramPool | None = None
    if config.rewards.reward_source == "programs":
        programs = build_program_pool(config)
    make = partial(prompt_examples, tokenizer=tokenizer, max_prompt_seq_len=config.sampling.max_prompt_seq_len)
    validate = partial(
        warn_of_template, tokenizer, end_id=end_id, keys=config.columns, responses=RESPONSES_OF_STEPS[3]
    )
    if programs is not None:
        run.record.sandbox = programs.level
        data = load_problems(config, make, programs, validate)
    else:
        data = load_step_data(config, PromptExample, make, validate, reads_prompts=not config.has_episodes)
    plan = plan_run(config, run, data)
    if config.rewards.source_names:
        logger.info("%s", config.rewards.formula)
    warmup = config.optimizers.critic_warmup_updates
    if warmup:
        logger.info("the first %d updates train the critic alone (--critic_warmup_updates)", warmup)
    if config.has_episodes:
        warn_of_wait(config, len(data.eval))
    environments = open_environments(config, tokenizer)
    models = build_ppo_models(config, plan, tokenizer, programs, record_decoding(run))
    average = MovingAverage(models.actor) if config.memory.enable_ema else None

    actor_base = config.models.actor_model_name_or_path
    critic_base = config.models.critic_model_name_or_path or actor_base
    saved = [SavedModel(models.actor, "policy", actor_base, "actor")]
    if average is not None:
        role = "policy (moving average)"
        saved.append(SavedModel(models.actor, role, actor_base, "actor_ema", average.whole_weights))
    if models.critic is not None:
        saved.append(SavedModel(models.critic, "critic", critic_base, "critic"))
    average_parts = None if average is None else average.parts
    algorithm = PPO(
        models,
        data.train,
        data.eval,
        tokenizer,
        condition,
        config,
        run,
        average,
        sampler=build_episode_sampler(config, models, tokenizer, environments),
    )
    loop_of(algorithm, models.trained, saved, tokenizer, config, run, average_parts).fit()


def check_ppo_lengths(config: PPOConfig) -> None:
    """Checks, before anything is loaded, that models can read texts of the lengths that flags allow.

    Raises:
        UserError: a model reads fewer tokens.
    """
    tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
    check_shared_base(config)
    check_heads(config)
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
    if reward and not reward_on_base and own_reward_tokenizer(config, reward, tokenizer) is None:
        tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
        check_length(reward, REWARD, tokens, "--max_prompt_seq_len + --max_answer_seq_len")
        reads_ids = True
    if reward and reads_ids:
        warn_of_other_end(open_config(reward, REWARD), end_token or tokenizer.eos_token, f"{REWARD} {reward}")
    teacher = config.teacher.teacher_model_name_or_path
    if teacher is not None:
        check_teacher(config, teacher, tokenizer)
    return tokenizer


def check_teacher(config: PPOConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if a teacher cannot give the log-probs of every token that the actor may sample."""
    teacher_tokenizer = load_tokenizer(path, TEACHER, end_token=config.data.end_of_conversation_token)
    if not same_ids(tokenizer, teacher_tokenizer):
        raise UserError(
            f"{TEACHER} {path} and {ACTOR} {config.models.actor_model_name_or_path} have different vocabularies"
            f" ({vocabulary_difference(tokenizer, teacher_tokenizer)}), but the teacher must give the probability of"
            " each token that the actor samples. Give a teacher of the actor's family, with the same tokenizer."
        )
    teacher_config = open_config(path, TEACHER)
    if lacks_rows(teacher_config, tokenizer):
        raise UserError(
            f"{TEACHER} {path}: its embeddings have {row_count(teacher_config)} rows, but its tokenizer has ids up to"
            f" {id_count(tokenizer) - 1}, whose probabilities it was never trained to give. Give a teacher that has"
            " all of them, such as a model of step 1."
        )
    tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
    check_length(path, TEACHER, tokens, "--max_prompt_seq_len + --max_answer_seq_len")


def build_ppo_models(
    config: PPOConfig,
    plan: RunPlan,
    tokenizer: PreTrainedTokenizerBase,
    programs: ProgramPool | None = None,
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
    model = load_causal_lm(
        path,
        ACTOR,
        settings.dtype,
        tokenizer,
        end_id,
        load_options,
        own_end_ids(path),
    )
    require_savable(model, f"{ACTOR} {path}")
    critic: PreTrainedModel | None = None
    reward: PreTrainedModel | None = None
    if config.memory.share_base:  # before the actor has adapters
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
    shared = None if reward is None else shared_scores(plan.batches, settings, reward)
    metric: FunctionScores | None = None
    if config.rewards.metric_function:
        metric = function_scores(config.rewards.metric_function, "--metric_function")
    return PPOModels(
        actor=actor,
        reference=_build_reference(config, plan, tokenizer, actor),
        critic=_build_critic(config, plan, tokenizer, critic) if config.advantages.needs.critic else None,
        reward=reward_source(config, plan, tokenizer, programs, shared),
        rollouts=_rollout_engine(config, actor, tokenizer, report),
        metric=metric,
        metric_name=config.rewards.metric_name or "",
        teacher=_build_teacher(config, plan, tokenizer),
    )


def _build_reference(
    config: PPOConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase, actor: Engine[PolicyModel]
) -> PolicyEngine:
    """The SFT model; with LoRA, the actor without its adapters."""
    if config.memory.actor_lora_dim:
        return AdaptersOff(actor)
    settings = frozen_settings(config, plan)
    seed_new_rows(config, tokenizer)
    path = config.models.actor_model_name_or_path
    model = load_causal_lm(
        path,
        ACTOR,
        settings.dtype,
        tokenizer,
        load_options=load_options_of(config, settings),
    )
    return frozen_engine(PolicyModel(model), settings)


def _build_teacher(config: PPOConfig, plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> PolicyEngine | None:
    """The teacher, frozen like the reference; None without one."""
    path = config.teacher.teacher_model_name_or_path
    if path is None:
        return None
    settings = frozen_settings(config, plan)
    model = load_causal_lm(path, TEACHER, settings.dtype, tokenizer, load_options=load_options_of(config, settings))
    return frozen_engine(PolicyModel(model), settings)


def has_new_rows(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the actor's embeddings lack rows for ids of its tokenizer and must grow."""
    return lacks_rows(open_config(config.models.actor_model_name_or_path, ACTOR), tokenizer)


def seed_new_rows(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Seeds torch, so that actor and reference get the same new rows, which change all log-probs."""
    if has_new_rows(config, tokenizer):
        torch.manual_seed(config.optimisation.seed)


def _build_critic(
    config: PPOConfig,
    plan: RunPlan,
    tokenizer: PreTrainedTokenizerBase,
    shared: PreTrainedModel | None,
) -> Engine[ScalarModel]:
    """The engine of the critic; with --share_base, its model is `shared`."""
    settings = engine_settings(
        config,
        plan,
        gradient_checkpointing=bool(config.memory.critic_gradient_checkpointing),
        zero_stage=config.memory.critic_zero_stage or 0,
    )
    path = config.models.critic_model_name_or_path or config.models.actor_model_name_or_path
    if config.models.critic_model_name_or_path is None:
        logger.info("the critic starts from the actor, with a zero value head")
    model = shared
    if model is None:
        model = load_critic(
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
        choose_trained(model, finetuning, path)
    optimizer = optimizer_settings(
        config,
        plan.updates,
        config.optimizers.critic_learning_rate,
        config.optimizers.critic_weight_decay,
    )
    return train_engine(ScalarModel(model), optimizer, settings)


def _rollout_engine(
    config: PPOConfig,
    actor: Engine[PolicyModel],
    tokenizer: PreTrainedTokenizerBase,
    report: Report | None = None,
) -> RolloutEngine:
    """What samples from the actor: vLLM, or an engine of this process."""
    if config.rollouts.uses_vllm:
        if has_new_rows(config, tokenizer):
            raise UserError(
                f"{ACTOR} {config.models.actor_model_name_or_path}: --rollout_engine vllm opens the model as it is,"
                " but its embeddings have fewer rows than its tokenizer has ids. Use --rollout_engine continuous, or a"
                " model of step 1, which adds the rows."
            )
        max_tokens = config.sampling.max_prompt_seq_len + config.sampling.max_answer_seq_len
        if config.vllm.vllm_url is not None:
            needs = ServerNeeds(
                row_count(actor.module.inner.config),
                max_tokens,
                config.sampling.temperature or 1.0,
                config.vllm.vllm_timeout,
            )
            return VllmServers(config.vllm.vllm_url, needs)
        return VllmEngine(
            config.models.actor_model_name_or_path,
            max_tokens,
            config.vllm.vllm_gpu_memory,
            config.vllm.vllm_tensor_parallel,
        )
    return choose_engine(
        config.rollouts.rollout_engine,
        config.sampling.per_device_generation_batch_size * config.rollouts.samples_per_prompt,
        actor.module.inner,
        "--rollout_engine",
        config.sampling.decode_graphs,
        report,
    )


def open_environments(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> EnvironmentPool | None:
    """Starts the process of the environments, and tries the chat template; None without --environment.

    To be called before models are loaded, which may take minutes.

    Raises:
        UserError: the environment's class cannot be loaded, or the chat template cannot be used for episodes.
    """
    if config.rewards.environment is None:
        return None
    user = simulated_user(config) if config.has_simulated_user else None
    pool = EnvironmentPool(
        config.rewards.environment,
        config.episodes.environment_timeout,
        config.episodes.environment_workers,
        user,
    )
    tools = pool.traits.tools
    # Made for its checks of the chat template alone; the player of episodes makes its own.
    ConversationEncoder(tokenizer, {} if tools is None else {TOOLS: tools}, pool.traits.roles)
    return pool


def build_episode_sampler(
    config: PPOConfig,
    models: PPOModels,
    tokenizer: PreTrainedTokenizerBase,
    environments: EnvironmentPool | None,
) -> EpisodeSampler | None:
    """What samples episodes of several turns with these environments; None without any."""
    if environments is None:
        return None
    actor = build_actor_sampler(models, tokenizer, config)
    limits = EpisodeLimits(
        config.episodes.max_turns,
        config.sampling.max_prompt_seq_len,
        config.sampling.max_answer_seq_len,
        config.episodes.max_turn_seq_len,
    )
    skips = config.rewards.on_reward_error == "skip"
    columns_of = prompt_columns if config.has_simulated_user else all_columns
    return EpisodeSampler(actor, EpisodePlayer(tokenizer, actor.sampling, environments, limits, skips, columns_of))


def simulated_user(config: PPOConfig) -> UserSettings:
    """Who plays the user with --environment simulated_user; warns of a server that is reached without encryption.

    Raises:
        UserError: the key of the server is missing.
    """
    flags = config.user
    max_turns = config.episodes.max_turns
    if flags.user_server is None:
        return UserSettings(max_turns, function=flags.user_function or "")
    server = UserServer(
        url=flags.user_server,
        model=flags.user_model or "",
        max_tokens=config.user_requests.user_max_tokens,
        temperature=config.user_requests.user_temperature,
        timeout=config.episodes.environment_timeout,
        tries=config.user_requests.user_tries,
        cache=str(Path(config.output.output_dir) / USER_CACHE),
    )
    server.endpoint()  # raises if there is no key
    return UserSettings(max_turns, server)


def warn_of_wait(config: PPOConfig, held_out: int) -> None:
    """Warns where processes may wait longer for the environments of an evaluation than --ddp_timeout allows.

    Args:
        config: the flags, with --environment.
        held_out: rows of all processes.
    """
    processes = world_size()
    prompts = min(config.num_eval_prompts(processes) or held_out, held_out)
    wait = longest_wait(config.episodes, -(-prompts // processes))
    if processes > 1 and wait >= config.engine.ddp_timeout and is_main():
        logger.warning(
            "An evaluation has %d episodes; if no environment answers within --environment_timeout %g, it takes %g s"
            " on a process, and others stop waiting after --ddp_timeout %d. Raise --environment_workers %d, or lower"
            " --eval_prompts or --environment_timeout.",
            prompts,
            config.episodes.environment_timeout,
            wait,
            config.engine.ddp_timeout,
            config.episodes.environment_workers,
        )


def check_heads(config: PPOConfig) -> None:
    """Raises UserError if the actor's attention heads cannot be split over the ranks that share vLLM."""
    if config.vllm.vllm_tensor_parallel == 1:
        return
    heads: int = open_config(config.models.actor_model_name_or_path, ACTOR).get_text_config().num_attention_heads
    if heads % config.vllm.vllm_tensor_parallel:
        raise UserError(
            f"--vllm_tensor_parallel {config.vllm.vllm_tensor_parallel} does not divide the {heads} attention heads "
            f"of {ACTOR} {config.models.actor_model_name_or_path}."
        )
