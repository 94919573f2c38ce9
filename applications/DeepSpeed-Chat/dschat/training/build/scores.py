# SPDX-License-Identifier: Apache-2.0
"""Where scores come from: reward models, functions, programs."""

import logging

import torch
from transformers import PreTrainedTokenizerBase

from dschat.training.build.engines import REWARD, RunPlan, frozen_settings, opening_of
from dschat.base.user_function import load_function
from dschat.engine.engine import frozen_engine
from dschat.engine.process_group import training_dtype
from dschat.models.limits import check_length
from dschat.models.load import load_classifier, load_scalar, open_config, reads_both_ways
from dschat.models.scalar import ScalarModel, warn_of_reward_loss
from dschat.models.tokenizer import same_ids
from dschat.run.distributed import device
from dschat.scoring.function import FunctionDialogueScores, FunctionScores, require_arguments
from dschat.scoring.programs.run import ProgramPool
from dschat.scoring.programs.scores import ProgramScores
from dschat.scoring.reward_model import RewardModelDialogueScores, RewardModelScores, TextRewardScores
from dschat.scoring.reward_reader import (
    ClassifierReader,
    ReaderFlags,
    RewardReader,
    load_reward_model,
    load_reward_tokenizer,
)
from dschat.scoring.source import DialogueScores, ScoreSource, Weighted, WeightedScores
from dschat.scoring.url import UrlScores, UrlSettings
from dschat.settings.ppo import PPOConfig
from dschat.settings.refuel import RefuelOnlineConfig
from dschat.training.iteration import eval_size, pass_size

logger = logging.getLogger(__name__)

STEP_3 = ReaderFlags(
    REWARD, "--rm_template", "Lower --max_prompt_seq_len or --max_answer_seq_len, or give --on_reward_error skip"
)


def build_program_pool(config: PPOConfig) -> ProgramPool:
    """What runs programs; raises UserError where the machine cannot shut them in as asked for."""
    stops_early = config.programs.program_reward == "paper"  # the first error decides its reward
    return ProgramPool(
        config.programs.sandbox_level,
        config.programs.sandbox_workers,
        max_tests=config.programs.max_tests,
        to_the_end=not stops_early,
    )


def reward_source(
    config: PPOConfig,
    plan: RunPlan,
    tokenizer: PreTrainedTokenizerBase,
    programs: ProgramPool | None,
    on_base: ScoreSource | None = None,
) -> ScoreSource:
    """The source of scores of a run, or the weighted sum of several.

    `programs` runs the responses, with --reward_source programs; `on_base` is the reward model's, if its base is the
    actor's.
    """
    skips = config.rewards.on_reward_error == "skip"
    sources: list[ScoreSource] = []
    for spec in config.rewards.reward_function or []:
        source = function_scores(
            spec, "--reward_function", config.rewards.on_reward_error, config.rewards.segment_rewards is not None
        )
        sources.append(source)
    if on_base is not None:
        sources.append(on_base)
    elif config.rewards.reward_model_name_or_path is not None:
        sources.append(_model_scores(config, config.rewards.reward_model_name_or_path, plan, tokenizer))
    if config.rewards.reward_url is not None:
        asked = (
            config.rewards.reward_url,
            config.rewards.reward_batch,
            config.rewards.reward_timeout,
            config.rewards.reward_patience,
        )
        sources.append(UrlScores(UrlSettings(*asked, skips)))
    if programs is not None:
        sources.append(ProgramScores(programs, config.programs.program_reward, skips, config.programs.program_block))
    if len(sources) == 1 and config.rewards.reward_weights is None and not skips:
        return sources[0]
    named = len(sources) > 1 or config.rewards.reward_weights is not None
    names = config.rewards.source_names if named else [""]
    weights = config.rewards.reward_weights or [1.0] * len(sources)
    return WeightedScores([Weighted(*one) for one in zip(names, weights, sources, strict=True)], skips)


def own_reward_tokenizer(
    config: PPOConfig, path: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer, if the model must read texts: it is another than the actor's, or --rm_template."""
    own = load_reward_tokenizer(path, config.rewards.rm_template, STEP_3)
    return own if config.rewards.rm_template or not same_ids(tokenizer, own) else None


def _model_scores(config: PPOConfig, path: str, plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> ScoreSource:
    settings = frozen_settings(config, plan)
    opening = opening_of(config, settings)
    own, size = own_reward_tokenizer(config, path, tokenizer), pass_size(plan.batches).without_gradient
    if own is None:
        model = load_scalar(path, REWARD, settings.dtype, tokenizer, may_be_new=False, opening=opening)
        warn_of_reward_loss(model.config, f"{REWARD} {path}")
        return RewardModelScores(frozen_engine(ScalarModel(model), settings), size.rows, size.tokens)
    form = "its chat template" if config.rewards.rm_template else "prompt + response + EOS"
    logger.info("%s %s scores through text, as %s, with a tokenizer of its own", REWARD, path, form)
    skips = config.rewards.on_reward_error == "skip"
    if reads_both_ways(open_config(path, REWARD)):
        where = (device(), settings.dtype, size.rows, STEP_3, size.tokens)
        reader = load_reward_model(path, own, config.rewards.rm_template, *where)
        return TextRewardScores(reader, skips)
    model = load_scalar(path, REWARD, settings.dtype, own, may_be_new=False, opening=opening)
    engine = frozen_engine(ScalarModel(model), settings)
    classifier = ClassifierReader(model, own.pad_token_id, device(), size.rows, False, engine, size.tokens)
    return TextRewardScores(RewardReader(classifier, own, path, config.rewards.rm_template, STEP_3), skips)


def function_scores(spec: str, flag: str, on_error: str = "stop", with_segments: bool = False) -> FunctionScores:
    function = load_function(spec, flag)
    require_arguments(function, spec, flag, with_segments)
    return FunctionScores(function, flag, on_error)


def build_dialogue_scores(config: RefuelOnlineConfig, device: torch.device) -> DialogueScores:
    """The source of scores of an online REFUEL run, which computes on a device."""
    path, flag = config.dialogues.reward_model_name_or_path, "--reward_model"
    if path is None:
        flag = "--reward_function"
        return FunctionDialogueScores(load_function(config.dialogues.reward_function or "", flag), flag)
    check_length(path, flag, config.model.max_seq_len, "--max_seq_len")
    tokenizer = load_reward_tokenizer(path, rm_template=False, flags=ReaderFlags(flag))
    model = load_classifier(path, flag, training_dtype(config.engine.dtype), tokenizer)
    model.to("cpu" if config.engine.offload else device).eval()
    size = eval_size(config)
    pad_id, rows, tokens = tokenizer.pad_token_id, size.rows, size.tokens
    reader = ClassifierReader(model, pad_id, device, rows, config.engine.offload, max_tokens=tokens)
    return RewardModelDialogueScores(reader, tokenizer, f"{flag} {path}")
