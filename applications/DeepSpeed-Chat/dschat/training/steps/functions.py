# SPDX-License-Identifier: Apache-2.0
"""Scores of functions that the user has written (--reward_function, --metric_function)."""

from dschat.base.user_function import load_function
from dschat.scoring.function import FunctionScores, require_arguments
from dschat.settings.ppo import PPOConfig
from dschat.settings.rewards import OnRewardError
from dschat.training.steps.scores import SourceParts


def build_function(parts: SourceParts, spec: str) -> FunctionScores:
    """Scores of a function that --reward_function names."""
    flags = parts.config.rewards
    return function_scores(spec, "--reward_function", flags.on_reward_error, flags.segment_rewards is not None)


def function_scores(
    spec: str, flag: str, on_error: OnRewardError = "stop", with_segments: bool = False
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
