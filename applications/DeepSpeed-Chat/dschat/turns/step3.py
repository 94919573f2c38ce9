# SPDX-License-Identifier: Apache-2.0
"""Step 3 with --environment: builds the environments, the episode sampler, the simulated user and the score source."""

import logging
import math
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dschat.base.chat_servers import Endpoint, checked_address
from dschat.data.observations import check_template
from dschat.run.distributed import is_main, world_size
from dschat.settings.ppo import PPOConfig
from dschat.training.ppo.collect import build_actor_sampler
from dschat.training.ppo.models import PPOModels
from dschat.training.steps.scores import SourceParts
from dschat.turns.environments import EnvironmentPool
from dschat.turns.episodes import EpisodeLimits, EpisodePlayer, all_columns
from dschat.turns.sampler import EpisodeSampler
from dschat.turns.scores import EnvironmentScores
from dschat.turns.settings import EpisodeFlags, longest_wait
from dschat.turns.simulated_user import SERVER, UserSettings, prompt_columns
from dschat.turns.user_settings import UserFlags, UserRequestFlags

logger = logging.getLogger(__name__)

USER_CACHE = ".user-cache"  # answers of the simulated user's server, below the output folder


def open_environments(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> EnvironmentPool:
    """Starts the process of the environments, and tries the chat template.

    To be called before models are loaded, which may take minutes.

    Raises:
        UserError: the class or the simulated user cannot be loaded, or the chat template does not suit episodes.
    """
    flags: EpisodeFlags = config.episodes
    pool = EnvironmentPool(
        spec=config.rewards.environment or "",
        timeout=flags.environment_timeout,
        workers=flags.environment_workers,
        user=build_user_settings(config) if config.has_simulated_user else None,
    )
    check_template(tokenizer, pool.traits.template_arguments, pool.traits.roles)
    return pool


def build_episode_sampler(
    config: PPOConfig, models: PPOModels, tokenizer: PreTrainedTokenizerBase, environments: EnvironmentPool
) -> EpisodeSampler:
    """Sampler of multi-turn episodes in these environments."""
    actor = build_actor_sampler(models, tokenizer, config)
    flags: EpisodeFlags = config.episodes
    limits = EpisodeLimits(
        turns=flags.max_turns,
        prompt_tokens=config.sampling.max_prompt_seq_len,
        tokens=config.sampling.max_answer_seq_len,
        turn_tokens=flags.max_turn_seq_len,
    )
    player = EpisodePlayer(
        tokenizer=tokenizer,
        sampling=actor.sampling,
        pool=environments,
        limits=limits,
        skips_failures=config.rewards.on_reward_error == "skip",
        columns_of=prompt_columns if config.has_simulated_user else all_columns,
    )
    return EpisodeSampler(actor, player)


def build_user_settings(config: PPOConfig) -> UserSettings:
    """Who plays the user with --environment simulated_user.

    Raises:
        UserError: the address of the server is invalid.
    """
    user: UserFlags = config.user
    requests: UserRequestFlags = config.user_requests
    episodes: EpisodeFlags = config.episodes
    if user.user_server is None:
        return UserSettings(max_turns=episodes.max_turns, function=user.user_function or "")
    endpoint = Endpoint(
        model=user.user_model or "",
        base_url=checked_address(user.user_server, SERVER.url),
        max_tokens=requests.user_max_tokens,
        timeout=episodes.environment_timeout,
        tries=requests.user_tries,
        flags=SERVER,
    )
    return UserSettings(
        max_turns=episodes.max_turns,
        endpoint=endpoint,
        temperature=requests.user_temperature,
        cache=str(Path(config.output.output_dir) / USER_CACHE),
    )


def warn_of_wait(config: PPOConfig, held_out: int) -> None:
    """Warns where processes may wait longer for the environments of an evaluation than --ddp_timeout allows.

    Args:
        config: the flags, with --environment.
        held_out: number of held-out rows, over all processes.
    """
    processes = world_size()
    if processes == 1 or not is_main():
        return
    prompts = min(config.num_eval_prompts or held_out, held_out)
    flags: EpisodeFlags = config.episodes
    wait = longest_wait(flags, math.ceil(prompts / processes))
    if wait < config.engine.ddp_timeout:
        return
    prompts_flag = "--eval_prompts" if config.rollouts.eval_iters is None else "--eval_iters"
    logger.warning(
        "An evaluation has %d episodes; if no environment answers within --environment_timeout %g, it takes %g s"
        " on a process, and others stop waiting after --ddp_timeout %d. Raise --environment_workers (%d), or lower"
        " %s or --environment_timeout.",
        prompts,
        flags.environment_timeout,
        wait,
        config.engine.ddp_timeout,
        flags.environment_workers,
        prompts_flag,
    )


def build_environment(parts: SourceParts, environment: str) -> EnvironmentScores:
    """Scores from the environments' own rewards: a builder of `SourceKind` that needs neither argument."""
    return EnvironmentScores()
