# SPDX-License-Identifier: Apache-2.0
"""Flags of episodes of several turns, in which an environment answers the policy, and the rules between them."""

from __future__ import annotations

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
    if config.rewards.environment is not None:
        check_function_path("environment", config.rewards.environment)


def _turn_is_longer(config: Any) -> bool:
    """Whether a reply may be longer than an episode."""
    longest_turn: int = config.episodes.max_turn_seq_len or 0
    return bool(longest_turn > config.sampling.max_answer_seq_len)


EPISODE_RULES: tuple[Rule[Any] | Check[Any], ...] = (  # of step 3's configuration
    Check(_check_environment),
    Rule(
        lambda config: config.has_episodes and config.rollouts.uses_vllm,
        "--environment with --rollout_engine vllm: replies of several turns are sampled by the training processes."
        " Use --rollout_engine continuous.",
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
        lambda config: (
            config.has_episodes
            and config.episodes.environment_timeout * (config.episodes.max_turns + 1) >= config.engine.ddp_timeout
        ),
        "--environment_timeout {environment_timeout:g} in each of --max_turns {max_turns} turns and at the beginning"
        " is not below --ddp_timeout {ddp_timeout}, after which the other processes stop waiting: lower it, or raise"
        " --ddp_timeout.",
    ),
)
