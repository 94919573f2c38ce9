# SPDX-License-Identifier: Apache-2.0
"""Where scores come from: reward models, functions, programs."""

import torch
from transformers import PreTrainedTokenizerBase

from dschat.builders.names import REWARD
from dschat.builders.settings import frozen_settings, opening_of
from dschat.common.user_function import load_function
from dschat.config.batches import BatchPlan
from dschat.config.ppo import PPOConfig
from dschat.config.refuel_online import RefuelOnlineConfig
from dschat.engine.engine import frozen_engine
from dschat.engine.process_group import choose_dtype
from dschat.models.limits import check_length
from dschat.models.load import load_classifier, load_scalar
from dschat.models.scalar import ScalarModel
from dschat.models.scored_at import warn_of_reward_loss
from dschat.scoring.classifier import ClassifierReader
from dschat.scoring.dialogue_scores import DialogueScores, FunctionDialogueScores, RewardModelDialogueScores
from dschat.scoring.function import FunctionScores
from dschat.scoring.programs.pool import ProgramPool
from dschat.scoring.programs.scores import ProgramScores
from dschat.scoring.reward_model import RewardModelScores
from dschat.scoring.reward_reader import ReaderFlags, load_reward_tokenizer
from dschat.scoring.source import ScoreSource


def build_program_pool(config: PPOConfig) -> ProgramPool:
    """What runs programs; raises UserError where the machine cannot shut them in as asked for."""
    stops_early = config.program_reward == "paper"  # the first error decides its reward
    return ProgramPool(
        config.sandbox_level, config.sandbox_workers, max_tests=config.max_tests, to_the_end=not stops_early
    )


def reward_source(
    config: PPOConfig, plan: BatchPlan, tokenizer: PreTrainedTokenizerBase, programs: ProgramPool | None
) -> ScoreSource:
    if programs is not None:
        return ProgramScores(programs, config.program_reward)
    if config.reward_model_name_or_path is None:
        return function_scores(config.reward_function or "", "--reward_function")
    settings = frozen_settings(config, plan)
    path, opening = config.reward_model_name_or_path, opening_of(config, settings)
    model = load_scalar(path, REWARD, settings.dtype, tokenizer, may_be_new=False, opening=opening)
    warn_of_reward_loss(model.config, f"{REWARD} {path}")
    return RewardModelScores(frozen_engine(ScalarModel(model), settings), plan.micro_batch)


def function_scores(spec: str, flag: str) -> FunctionScores:
    return FunctionScores(load_function(spec, flag), flag)


def build_dialogue_scores(config: RefuelOnlineConfig, device: torch.device) -> DialogueScores:
    """The source of scores of an online REFUEL run, which computes on a device."""
    path, flag = config.reward_model_name_or_path, "--reward_model"
    if path is None:
        flag = "--reward_function"
        return FunctionDialogueScores(load_function(config.reward_function or "", flag), flag)
    check_length(path, flag, config.max_seq_len, "--max_seq_len")
    tokenizer = load_reward_tokenizer(path, rm_template=False, flags=ReaderFlags(flag))
    model = load_classifier(path, flag, choose_dtype(config.dtype)).to("cpu" if config.offload else device).eval()
    rows = config.per_device_eval_batch_size
    reader = ClassifierReader(model, tokenizer.pad_token_id, device, rows, config.offload)
    return RewardModelDialogueScores(reader, tokenizer, f"{flag} {path}")
