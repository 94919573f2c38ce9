# SPDX-License-Identifier: Apache-2.0
"""Builds the sources of scores of a run: reward models, functions, servers, programs, judges, environments."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from dschat.base.errors import UserError
from dschat.base.user_function import load_function
from dschat.engine.engine import frozen_engine
from dschat.engine.process_group import training_dtype
from dschat.models.limits import check_length
from dschat.models.load import is_bidirectional, load_classifier, load_trained_scalar
from dschat.models.pretrained import open_config
from dschat.models.scalar import ScalarModel, warn_of_reward_loss
from dschat.models.tokenizer import same_ids
from dschat.rollouts.chat_servers import OPENAI_URL, Endpoint, EndpointFlags, checked_address, with_key
from dschat.rollouts.reply_cache import ReplyCache
from dschat.run.distributed import device, world_size
from dschat.scoring.environment import EnvironmentScores
from dschat.scoring.function import FunctionDialogueScores, FunctionScores, require_arguments
from dschat.scoring.judge.client import JudgeClient
from dschat.scoring.judge.costs import Prices, Spending
from dschat.scoring.judge.grading import harmless_question
from dschat.scoring.judge.scores import JudgeScores, JudgeSettings
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
from dschat.scoring.source import DialogueScores, NoScores, ScoreSource, Weighted, WeightedScores
from dschat.scoring.url import UrlScores, UrlSettings
from dschat.settings.ppo import PPOConfig
from dschat.settings.refuel import RefuelOnlineConfig
from dschat.settings.reward_judge import longest_rollout
from dschat.settings.rewards import SOURCE_NAMES, OnRewardError
from dschat.settings.rubrics import read_rubric
from dschat.training.build.engines import RunPlan, load_options_of
from dschat.training.build.frozen import REWARD, frozen_settings
from dschat.training.iteration import eval_size, pass_size

logger = logging.getLogger(__name__)

# Flags of step 3, as messages about a reward model's tokenizer and texts name them.
STEP_3_READER_FLAGS = ReaderFlags(
    model=REWARD,
    template="--rm_template",
    shorter="Lower --max_prompt_seq_len or --max_answer_seq_len, or give --on_reward_error skip",
)

JUDGE_CACHE = ".judge-cache"  # below the output folder
JUDGE_FLAGS = EndpointFlags(
    url="--judge_url",
    model="--judge_model",
    max_tokens="--judge_max_tokens",
    timeout="--judge_timeout",
    tries="--judge_tries",
    cache="--judge_cache",
)


def build_program_pool(config: PPOConfig) -> ProgramPool:
    """The pool that runs programs. Raises UserError if the machine cannot isolate them at the level asked for."""
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
    """The source of scores of a run, or the weighted sum of several; zeros for an estimator that reads none.

    Args:
        config: the flags.
        plan: batch sizes and placement of the run.
        tokenizer: the actor's tokenizer.
        programs: runs the programs in responses, with --reward_source programs.
        on_base: scores of a reward model that is an adapter on the actor's base, with --share_base.

    Raises:
        UserError: a function, a model, a rubric, a key or an address cannot be used.
    """
    return combine_sources(config, named_sources(config, plan, tokenizer, programs, on_base))


def named_sources(
    config: PPOConfig,
    plan: RunPlan,
    tokenizer: PreTrainedTokenizerBase,
    programs: ProgramPool | None,
    on_base: ScoreSource | None,
) -> list[tuple[str, ScoreSource]]:
    """The sources that the flags name, each with its name in --reward_weights, metrics and samples.

    A simulated user, who gives no rewards, is not among them. See `reward_source` for the arguments.
    """
    flags = config.rewards
    skips = flags.on_reward_error == "skip"
    with_segments = flags.segment_rewards is not None
    sources: list[tuple[str, ScoreSource]] = []
    specs = flags.reward_function or []
    for name, spec in zip(flags.source_names, specs, strict=False):  # names of functions come first
        sources.append((name, function_scores(spec, "--reward_function", flags.on_reward_error, with_segments)))
    if on_base is not None:
        sources.append((SOURCE_NAMES["reward_model_name_or_path"], on_base))
    elif flags.reward_model_name_or_path is not None:
        model = _model_scores(config, flags.reward_model_name_or_path, plan, tokenizer)
        sources.append((SOURCE_NAMES["reward_model_name_or_path"], model))
    if flags.reward_url is not None:
        settings = UrlSettings(
            flags.reward_url,
            flags.reward_batch,
            flags.reward_timeout,
            flags.reward_patience,
            skips,
            longest_wait(config),
        )
        sources.append((SOURCE_NAMES["reward_url"], UrlScores(settings)))
    if programs is not None:
        outcomes = ProgramScores(programs, config.programs.program_reward, skips, config.programs.program_block)
        sources.append((SOURCE_NAMES["reward_source"], outcomes))
    if flags.reward_judge is not None:
        sources.append((SOURCE_NAMES["reward_judge"], judge_scores(config, flags.reward_judge)))
    if config.has_episodes and not config.has_simulated_user:
        sources.append((SOURCE_NAMES["environment"], EnvironmentScores()))
    return sources


def combine_sources(config: PPOConfig, sources: Sequence[tuple[str, ScoreSource]]) -> ScoreSource:
    """One source of scores for a run: the weighted sum of named sources, a single source itself, or zeros for none."""
    if not sources and not config.has_simulated_user:
        return NoScores()
    weights = config.rewards.weights
    skips = config.rewards.on_reward_error == "skip"
    is_sum = len(sources) > 1 or config.rewards.reward_weights is not None
    # Beside sums, `WeightedScores` leaves out responses without a score, and adds metrics of a simulated user.
    if not (is_sum or skips or config.has_simulated_user):
        return sources[0][1]

    weighted = []
    for name, source in sources:
        weighted.append(Weighted(name if is_sum else "", weights[name], source))
    if config.has_simulated_user:
        # It rewards nothing. Its source counts turns, and gives no score to dialogues whose user failed.
        weighted.append(Weighted("", 1.0, EnvironmentScores()))
    return WeightedScores(weighted, skips)


def judge_scores(config: PPOConfig, rubric_file: str) -> JudgeScores:
    """Scores of the judge model by a rubric. No request is sent yet.

    Raises:
        UserError: key, address or the folder of cached answers cannot be used.
    """
    flags = config.judge
    rubric = read_rubric(rubric_file, "--reward_judge")
    endpoint = Endpoint(
        model=flags.judge_model or "",
        base_url=checked_address(flags.judge_url or OPENAI_URL, JUDGE_FLAGS.url),
        max_tokens=flags.judge_max_tokens,
        timeout=flags.judge_timeout,
        tries=flags.judge_tries,
        flags=JUDGE_FLAGS,
    )

    # Each process may spend an equal share of the limit.
    prices: Prices | None = None
    if flags.judge_price_in is not None and flags.judge_price_out is not None:
        prices = Prices(flags.judge_price_in, flags.judge_price_out)
    limit = flags.judge_max_cost
    limit_name = "--judge_max_cost"
    if limit is not None and world_size() > 1:
        limit /= world_size()
        limit_name += f", of which each of {world_size()} processes has"  # messages continue with the limit
    spending = Spending(prices, limit, limit_name)

    folder = Path(flags.judge_cache or Path(config.output.output_dir) / JUDGE_CACHE)
    client = JudgeClient(with_key(endpoint), ReplyCache(folder), spending, harmless_question(rubric))
    patience = longest_wait(config)
    skips = config.rewards.on_reward_error == "skip"
    return JudgeScores(client, JudgeSettings(rubric, flags.judge_concurrency, patience, skips))


def longest_wait(config: PPOConfig) -> float:
    """Seconds for all answers of a rollout. Other processes wait for this one, and give up after --ddp_timeout."""
    return longest_rollout(config) if world_size() > 1 else math.inf


def own_reward_tokenizer(
    config: PPOConfig, path: str, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a reward model that cannot read the actor's token ids.

    A reward model must read texts if its tokenizer differs from the actor's, or with --rm_template.

    Returns:
        The reward model's tokenizer if it must read texts, None if it can read the actor's token ids.

    Raises:
        UserError: it must read texts, but the responses are episodes, whose text lacks the tokens that separate turns.
    """
    reward_tokenizer = load_reward_tokenizer(path, config.rewards.rm_template, STEP_3_READER_FLAGS)
    if not config.rewards.rm_template and same_ids(tokenizer, reward_tokenizer):
        return None
    if config.has_episodes:
        raise UserError(
            f"--environment with {REWARD} {path}, whose tokenizer is not the actor's: it would read all turns of an"
            " episode as one response, without the tokens that separate them. Use a reward model with the actor's"
            " tokenizer, or a --reward_function, whose rows hold the messages."
        )
    return reward_tokenizer


def _model_scores(
    config: PPOConfig,
    path: str,
    plan: RunPlan,
    tokenizer: PreTrainedTokenizerBase,
) -> ScoreSource:
    """Scores of the reward model at a path.

    It reads the actor's token ids, or texts if `own_reward_tokenizer` says so. A model that reads texts in both
    directions, such as BERT, computes on this device; any other one is sharded like the run's frozen models.
    """
    settings = frozen_settings(config, plan)
    load_options = load_options_of(config, settings)
    size = pass_size(plan.batches).without_gradient
    reward_tokenizer = own_reward_tokenizer(config, path, tokenizer)
    if reward_tokenizer is None:
        model = load_trained_scalar(path, REWARD, settings.dtype, tokenizer, load_options)
        warn_of_reward_loss(model.config, f"{REWARD} {path}")
        return RewardModelScores(frozen_engine(ScalarModel(model), settings), size.rows, size.tokens)

    rm_template = config.rewards.rm_template
    skips = config.rewards.on_reward_error == "skip"
    if is_bidirectional(open_config(path, REWARD)):
        reader = load_reward_model(
            path,
            reward_tokenizer,
            rm_template,
            device(),
            settings.dtype,
            batch_size=size.rows,
            flags=STEP_3_READER_FLAGS,
            max_tokens=size.tokens,
        )
    else:
        model = load_trained_scalar(path, REWARD, settings.dtype, reward_tokenizer, load_options)
        classifier = ClassifierReader(
            model,
            reward_tokenizer.pad_token_id,
            device(),
            batch_size=size.rows,
            engine=frozen_engine(ScalarModel(model), settings),
            max_tokens=size.tokens,
        )
        reader = RewardReader(classifier, reward_tokenizer, path, rm_template, STEP_3_READER_FLAGS)
    logger.info("%s %s scores text, read as %s by its own tokenizer", REWARD, path, reader.form)
    return TextRewardScores(reader, skips)


def function_scores(
    spec: str,
    flag: str,
    on_error: OnRewardError = "stop",
    with_segments: bool = False,
) -> FunctionScores:
    """Scores of a user's function.

    Args:
        spec: ``module.py:function``.
        flag: the flag that names it, for messages.
        on_error: what to do if it fails, see `FunctionScores`.
        with_segments: it is called with macro actions, too.

    Raises:
        UserError: it cannot be imported, or does not take these arguments.
    """
    function = load_function(spec, flag)
    require_arguments(function, spec, flag, with_segments)
    return FunctionScores(function, flag, on_error)


def check_functions(config: PPOConfig) -> None:
    """Imports the functions of a run, each once, so that a mistake in them is said before data and models are read.

    Raises:
        UserError: one cannot be imported, or does not take the arguments that it is called with.
    """
    with_segments = config.rewards.segment_rewards is not None
    for spec in config.rewards.reward_function or []:
        function_scores(spec, "--reward_function", with_segments=with_segments)
    if config.rewards.metric_function:
        function_scores(config.rewards.metric_function, "--metric_function")


def dialogue_function_scores(spec: str) -> FunctionDialogueScores:
    """Scores of a user's function of dialogues, named by --reward_function.

    Raises:
        UserError: it cannot be imported, or does not take dialogues and rows.
    """
    flag = "--reward_function"
    return FunctionDialogueScores(load_function(spec, flag, ["dialogues", "rows"]), flag)


def build_dialogue_scores(config: RefuelOnlineConfig, path: str, reward_device: torch.device) -> DialogueScores:
    """Scores of the reward model of an online REFUEL run.

    Args:
        config: the flags.
        path: the reward model.
        reward_device: where it computes; with --offload its weights stay in main memory between calls.

    Raises:
        UserError: the model cannot be used.
    """
    flag = "--reward_model"
    check_length(path, flag, config.model.max_seq_len, "--max_seq_len")
    tokenizer = load_reward_tokenizer(path, rm_template=False, flags=ReaderFlags(flag))
    model = load_classifier(path, flag, training_dtype(config.engine.dtype), tokenizer)
    model.to("cpu" if config.engine.offload else reward_device)
    size = eval_size(config)
    reader = ClassifierReader(
        model,
        tokenizer.pad_token_id,
        reward_device,
        batch_size=size.rows,
        offload=config.engine.offload,
        max_tokens=size.tokens,
    )
    return RewardModelDialogueScores(reader, tokenizer, f"{flag} {path}")
