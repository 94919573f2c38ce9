# SPDX-License-Identifier: Apache-2.0
"""Flags of episodes of several turns, in which an environment answers the policy, and the rules between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dschat.settings.flags import ABOVE_0, AT_LEAST_1, FREE, flag
from dschat.settings.rules import Check, Rule, check_function_path


@dataclass(kw_only=True, frozen=True)
class EpisodeFlags:
    """Sizes of episodes, and how environments are called."""

    section = "episodes"

    max_turns: int = flag(
        "most replies of an episode, after which it ends although the environment is not done",
        8,
        AT_LEAST_1,
        only_with="environment",
    )
    max_turn_seq_len: int | None = flag(
        "maximum length of one reply in tokens; only the episode's max_answer_seq_len if not given",
        None,
        AT_LEAST_1,
        only_with="environment",
    )
    environment_timeout: float = flag(
        "seconds for a call of the environment, after which its episode has failed, see on_reward_error",
        60.0,
        ABOVE_0,
        FREE,
        only_with="environment",
    )
    environment_workers: int = flag(
        "environments that each process calls at the same time; each episode's has a process of its own",
        32,
        AT_LEAST_1,
        FREE,
        only_with="environment",
    )


def _check_environment(config: Any) -> None:
    if config.has_episodes and not config.has_simulated_user:
        check_function_path("environment", config.rewards.environment)


def _turn_is_longer(config: Any) -> bool:
    """Whether a reply may be longer than an episode."""
    longest_turn: int = config.episodes.max_turn_seq_len or 0
    return bool(longest_turn > config.sampling.max_answer_seq_len)


def longest_wait(flags: EpisodeFlags, episodes: int) -> float:
    """Seconds that the environments of episodes may take on one process: in each turn, and at the beginning.

    At most --environment_workers are called at the same time, and the others wait.
    """
    calls = math.ceil(episodes / flags.environment_workers)
    return calls * flags.environment_timeout * (flags.max_turns + 1)


def _wait_of_rollout(config: Any) -> float:
    prompts = config.sampling.per_device_generation_batch_size * config.rollouts.generation_batches
    return longest_wait(config.episodes, prompts * config.rollouts.samples_per_prompt)


EPISODE_RULES: tuple[Rule[Any] | Check[Any], ...] = (  # of step 3's configuration
    Check(_check_environment),
    Rule(
        lambda config: config.has_episodes and config.vllm.vllm_url is not None,
        "--environment with --vllm_url: processes ask servers together, but their episodes have different numbers of"
        " turns. Let the training processes run vLLM (drop --vllm_url), or use --rollout_engine continuous.",
    ),
    Rule(
        lambda config: config.has_episodes and config.vllm.vllm_tensor_parallel > 1,
        "--environment with --vllm_tensor_parallel {vllm_tensor_parallel}: processes that share an engine ask it"
        " together, but their episodes have different numbers of turns. Use --vllm_tensor_parallel 1.",
    ),
    Rule(
        lambda config: config.has_episodes and config.advantages.advantage_estimator in ("tempo", "segment_mc"),
        "--environment with --advantage_estimator {advantage_estimator}, which compares or continues prefixes of"
        " single responses. Use gae, rloo_turns or another estimator.",
    ),
    Rule(
        lambda config: config.has_episodes and config.rewards.segment_rewards is not None,
        "--environment with --segment_rewards: the environment gives the rewards of turns, and other sources score the"
        " whole episode. Drop --segment_rewards.",
    ),
    Rule(
        lambda config: config.has_episodes and config.rewards.rm_template,
        "--environment with --rm_template: the reward model's template would write all turns as one message. Drop"
        " --rm_template.",
    ),
    Rule(
        lambda config: config.has_episodes and config.rewards.on_reward_error == "retry",
        "--environment with --on_reward_error retry: an environment that has failed cannot be asked once more. Use"
        " stop or skip.",
    ),
    Rule(
        lambda config: config.has_episodes and _turn_is_longer(config),
        "--max_turn_seq_len {max_turn_seq_len} is longer than an episode: give at most --max_answer_seq_len"
        " {max_answer_seq_len}.",
    ),
    Rule(
        lambda config: config.has_episodes and _wait_of_rollout(config) >= config.engine.ddp_timeout,
        "--environment_timeout {environment_timeout:g} in each of --max_turns {max_turns} turns and at the beginning,"
        " with --environment_workers {environment_workers} calls at a time for the episodes of a process, is up to"
        " {wait:g} s and not below --ddp_timeout {ddp_timeout}, after which the other processes stop waiting: lower"
        " --environment_timeout, or raise --environment_workers or --ddp_timeout.",
        words=lambda config: {"wait": _wait_of_rollout(config)},
    ),
    Rule(
        lambda config: config.has_episodes and config.rewards.reward_url is not None,
        "--environment with --reward_url: the server would read all turns of an episode as one response, without the"
        " tokens that separate them. Use a --reward_function, whose rows hold the messages, or drop --reward_url.",
    ),
)
