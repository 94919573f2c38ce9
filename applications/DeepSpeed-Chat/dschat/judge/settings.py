# SPDX-License-Identifier: Apache-2.0
"""Flags of a judge model that scores the responses of step 3, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FREE, NOT_EMPTY, flag
from dschat.settings.rewards import longest_rollout
from dschat.settings.rules import ADDRESS, Check, Rule

if TYPE_CHECKING:
    from dschat.judge.rubrics import Rubric


@dataclass(kw_only=True, frozen=True)
class RewardJudgeFlags:
    """The judge model of --reward_judge, how it is asked, and what it may cost."""

    section = "judge model as a source of scores"

    judge_model: str | None = flag("name of the judge model on its server", None, NOT_EMPTY, only_with="reward_judge")
    judge_url: str | None = flag(
        "OpenAI-compatible server of the judge, up to /v1; OpenAI's if not given. The key is read from JUDGE_API_KEY",
        None,
        on_resume=FREE,
        only_with="reward_judge",
    )
    judge_max_tokens: int = flag("longest answer of the judge in tokens", 1024, AT_LEAST_1, only_with="reward_judge")
    judge_concurrency: int = flag(
        "requests of each process to the judge at the same time", 8, AT_LEAST_1, FREE, only_with="reward_judge"
    )
    judge_timeout: float = flag(
        "seconds to wait for an answer of the judge", 120.0, ABOVE_0, FREE, only_with="reward_judge"
    )
    judge_tries: int = flag(
        "how often a request to the judge is sent until an answer comes", 8, AT_LEAST_1, FREE, only_with="reward_judge"
    )
    judge_price_in: float | None = flag(
        "US dollars per million tokens sent to the judge", None, AT_LEAST_0, FREE, only_with="reward_judge"
    )
    judge_price_out: float | None = flag(
        "US dollars per million tokens that the judge answers", None, AT_LEAST_0, FREE, only_with="reward_judge"
    )
    judge_max_cost: float | None = flag(
        "stop before the judge costs more dollars; each process may spend an equal share, and every start of the run"
        " counts from 0",
        None,
        AT_LEAST_0,
        FREE,
        only_with="reward_judge",
    )
    judge_cache: str | None = flag(
        "folder of the judge's answers, which runs may share; .judge-cache below output_dir if not given",
        None,
        NOT_EMPTY,
        FREE,
        only_with="reward_judge",
        path=True,
    )


def _asks(config: Any) -> bool:
    return config.rewards.reward_judge is not None


def _ranks(config: Any) -> bool:
    """Whether the judge ranks the responses to a prompt."""
    return _asks(config) and _rubric(config).ranks


def _check_rubric(config: Any) -> None:
    if _asks(config):
        _rubric(config)


def _rubric(config: Any) -> Rubric:
    from dschat.judge.rubrics import read_rubric  # which a run without a judge does not load

    return read_rubric(config.rewards.reward_judge, "--reward_judge")


def _longest_wait(config: Any) -> float:
    """Seconds until a request to a judge that does not answer has failed, if it asks for no longer pauses."""
    from dschat.base.chat_servers import LONGEST_DELAY  # which a run without a judge does not load

    wait: float = (config.judge.judge_timeout + LONGEST_DELAY) * config.judge.judge_tries
    return wait


JUDGE_RULES: tuple[Rule[Any] | Check[Any], ...] = (  # of step 3's configuration
    Check(_check_rubric),
    Rule(
        lambda config: _asks(config) and config.judge.judge_model is None,
        "--reward_judge {reward_judge}: add --judge_model, the name of the judge on its server.",
    ),
    Rule(
        lambda config: config.judge.judge_url is not None and not ADDRESS.fullmatch(config.judge.judge_url),
        "--judge_url {judge_url} is not an address: give one such as http://127.0.0.1:8000/v1, without a user's name,"
        " password or query; the key is read from JUDGE_API_KEY.",
    ),
    Rule(
        lambda config: (config.judge.judge_price_in is None) != (config.judge.judge_price_out is None),
        "--judge_price_in and --judge_price_out: give both, or neither.",
    ),
    Rule(
        lambda config: config.judge.judge_max_cost is not None and config.judge.judge_price_in is None,
        "--judge_max_cost {judge_max_cost:g} needs the prices of the model: give --judge_price_in and"
        " --judge_price_out.",
    ),
    Rule(
        lambda config: _asks(config) and _longest_wait(config) >= longest_rollout(config),
        "--judge_timeout {judge_timeout:g} in each of --judge_tries {judge_tries} tries is, with the pauses between"
        " them, up to {wait:g} s; all questions of a rollout must be answered within {patience:g} s, a part of"
        " --ddp_timeout {ddp_timeout}, after which the other processes stop waiting: lower them, or raise it.",
        words=lambda config: {"wait": _longest_wait(config), "patience": longest_rollout(config)},
    ),
    Rule(
        lambda config: _ranks(config) and config.rollouts.samples_per_prompt < 2,
        "--reward_judge {reward_judge} ranks the responses to a prompt: give --samples_per_prompt of at least 2, or"
        ' set judge = "points" in the file.',
    ),
    Rule(
        lambda config: _ranks(config) and config.advantages.needs.segment_values,
        "--reward_judge {reward_judge} ranks whole responses to a prompt, but --advantage_estimator"
        ' {advantage_estimator} scores completions of each state by themselves: set judge = "points" in the file.',
    ),
    Rule(
        lambda config: (
            _asks(config) and config.rewards.segment_rewards is not None and len(config.rewards.source_names) == 1
        ),
        "--segment_rewards with --reward_judge alone: the judge gives one number for each response, and none for its"
        " macro actions. Drop --segment_rewards.",
    ),
    Rule(
        lambda config: _ranks(config) and len(config.rewards.source_names) == 1,
        "--reward_judge {reward_judge} ranks the responses to a prompt: evaluations have one response to each prompt,"
        " whose score is 0. Watch a --metric_function, or compare models with `dschat judge`.",
        warns=True,
    ),
)
