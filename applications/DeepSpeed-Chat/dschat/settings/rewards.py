# SPDX-License-Identifier: Apache-2.0
"""Flags of where step 3's scores come from (functions, models, servers, programs, environments), and their rules."""

import math
from collections import Counter
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

from dschat.base.errors import UserError
from dschat.base.extras import require_extra
from dschat.base.glossary import names_under
from dschat.settings.flags import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FREE, NOT_EMPTY, flag
from dschat.settings.rules import ADDRESS, Check, Rule, check_function_path

READ_RUBRIC = "dschat.judge.rubrics:read_rubric"
SIMULATED_USER = "simulated_user"  # value of --environment
PATIENCE = 0.9  # share of --ddp_timeout in which the requests of a rollout must be answered
OnRewardError = Literal["stop", "retry", "skip"]
ProgramBlock = Literal["first", "last"]
SandboxLevel = Literal["bubblewrap", "namespaces", "rlimits"]

WITH_PROGRAMS = "reward_source programs"  # which the flags of programs need beside them
# Names that a second score may not take: the metrics of step 3 have keys of these names.
METRIC_NAMES = (
    *names_under("objective/", "ppo"),
    *names_under("eval/", "ppo"),
    *("prompt", "response", "score", "finished", "tokens", "prompt_ids", "response_ids"),  # columns of sample files
    *("prompt_messages", "messages", "response_mask", "turn_rewards", "done"),  # the last four: of episodes
)
JUDGED = "judge_"  # begins the name of a criterion in metrics and samples
REWARD_TOKEN = "REWARD_API_KEY"  # environment variable: the secret of a server of scores and of those who ask it


@dataclass(frozen=True)
class SourceKind:
    """A kind of source of scores.

    Attributes:
        flag: gives a source, or a list of them.
        name: in --reward_weights, metrics and samples; a function has its own.
        label: in reports.
        builder: "module:function" in dschat, imported when the flag is given. It takes the
            `dschat.training.steps.scores.SourceParts` and the flag's value, and returns a `ScoreSource`.
        extra: of setup.py, which it needs; empty for none (`dschat.base.extras`).
    """

    flag: str
    name: str
    label: str
    builder: str
    extra: str = ""


SCORE_SOURCES = (
    SourceKind("reward_function", "", "reward-function score", "training.steps.functions:build_function"),
    SourceKind(
        "reward_model_name_or_path", "reward_model", "reward-model score", "training.steps.reward_reading:build_model"
    ),
    SourceKind("reward_url", "reward_url", "score of a server", "training.steps.reward_url:build_server"),
    SourceKind("reward_source", "programs", "score of programs", "programs.step3:build_programs", "programs"),
    SourceKind("reward_judge", "judge", "score of a judge", "judge.step3:build_judge"),
    SourceKind("environment", "environment", "reward of the environment", "turns.step3:build_environment"),
)
SOURCE_BY_FLAG = {source.flag: source for source in SCORE_SOURCES}
SOURCE_FLAGS = tuple(source.flag for source in SCORE_SOURCES)
SOURCE_NAMES = tuple(source.name for source in SCORE_SOURCES if source.name)


@dataclass(kw_only=True, frozen=True)
class ProgramFlags:
    """How programs are run and scored."""

    section = "programs"

    program_reward: Literal["paper", "ratio"] = flag(
        "paper: -1 for a compile error, -0.6 for a runtime error or time-out, otherwise -0.3 + 1.3 x fraction of"
        " tests passed; ratio: fraction of tests passed",
        "paper",
        only_with=WITH_PROGRAMS,
    )
    program_block: ProgramBlock = flag(
        "which fenced code block of a response is its program, the first or the last; blocks marked as Python take"
        " precedence over unmarked ones",
        "last",
        only_with=WITH_PROGRAMS,
    )
    sandbox_level: SandboxLevel = flag(
        "minimum isolation level of the sandbox for programs", "namespaces", only_with=WITH_PROGRAMS
    )
    sandbox_workers: int = flag(
        "programs that each process runs at the same time", 4, AT_LEAST_1, only_with=WITH_PROGRAMS
    )
    max_tests: int | None = flag(
        "run only the first N tests of a row; all if not given", None, AT_LEAST_1, only_with=WITH_PROGRAMS
    )
    drop_unsolvable: bool = flag(
        "drop rows whose reference solution fails their tests", False, only_with=WITH_PROGRAMS
    )


@dataclass(kw_only=True, frozen=True)
class RewardFlags:
    """Where the score comes from; several sources are added up."""

    section = "sources of scores"

    reward_model_name_or_path: str | None = flag(
        "reward model; if no source of scores is given, the model of --critic_model_name_or_path",
        None,
        NOT_EMPTY,
        FREE,
        path=True,
    )
    reward_function: list[str] | None = flag(
        "one or more module.py:function, called with (prompts, responses, rows), which return one score per row; or"
        " math, math_format, gsm8k, which check the answer by the column answer (docs/rewards.md)",
        None,
        path=True,
    )
    reward_url: str | None = flag(
        "address of a reward server such as `dschat serve`; docs/rewards.md describes the protocol", None
    )
    reward_source: Literal["programs"] | None = flag(
        "programs: the score is the result of running the program in the response on the tests of its row (column"
        " input_output) in a sandbox",
        None,
    )
    reward_judge: str | None = flag(
        "rubric.toml: a judge model (judge_model) gives the score, by grading each response on the rubric's criteria"
        " or by ranking the responses to a prompt; docs/rewards.md describes the file",
        None,
        NOT_EMPTY,
        path=True,
    )
    environment: str | None = flag(
        "module.py:Class with reset(row, seed) -> messages and step(messages, reply) -> (messages, reward, done):"
        " train on episodes of several turns, whose score is the sum of the rewards; or simulated_user, who answers"
        " the policy and rewards nothing; docs/turns.md",
        None,
        path=True,
    )
    reward_weights: list[str] | None = flag(
        "weights of several sources of scores by name, such as judge=0.5; 1 if not given. Names: that of a function,"
        f" {', '.join(SOURCE_NAMES)}",
        None,
        NOT_EMPTY,
    )
    on_reward_error: OnRewardError = flag(
        "if a source or an environment fails or returns no number: stop the run, retry three times, or skip those"
        " responses in training",
        "stop",
        on_resume=FREE,
    )
    segment_rewards: Literal["each", "prefix"] | None = flag(
        "sources return one reward per macro action (each), or one score for the response up to the end of each macro"
        " action, whose differences are the rewards (prefix)",
        None,
    )
    metric_function: str | None = flag(
        "module.py:function, called with (prompts, responses, rows): a second score that is logged but not trained on",
        None,
        path=True,
    )
    rm_template: bool = flag(
        "format prompt and response with the reward model's own chat template, as a user and an assistant message",
        False,
        only_with="reward_model_name_or_path",
    )
    reward_batch: int = flag(
        "maximum responses per request to reward_url", 64, AT_LEAST_1, FREE, only_with="reward_url"
    )
    reward_timeout: float = flag(
        "time-out of a request to reward_url, in seconds", 60.0, ABOVE_0, FREE, only_with="reward_url"
    )
    reward_patience: float = flag(
        "how long to retry while reward_url does not respond, in seconds",
        300.0,
        AT_LEAST_0,
        FREE,
        only_with="reward_url",
    )

    @property
    def metric_name(self) -> str | None:
        """The name of the metric function, which is the name of its metric; None without one."""
        return None if self.metric_function is None else self.metric_function.rpartition(":")[2]

    @property
    def sources(self) -> list[tuple[SourceKind, str]]:
        """The sources of scores with the values of their flags. A simulated user gives no rewards."""
        sources: list[tuple[SourceKind, str]] = []
        for kind in SCORE_SOURCES:
            flag_value = getattr(self, kind.flag)
            values = flag_value if isinstance(flag_value, list) else [flag_value]
            sources += [(kind, value) for value in values if value not in (None, SIMULATED_USER)]
        return sources

    def check_installed(self) -> None:
        """Check that the extras of the sources are there. Raises UserError, which says what to install."""
        for kind, value in self.sources:
            if kind.extra:
                require_extra(kind.extra, f"--{kind.flag} {value}")

    @property
    def are_named(self) -> bool:
        """Whether metrics and samples have the score of each source under its name; otherwise it is just the score."""
        return len(self.sources) > 1 or self.reward_weights is not None

    @property
    def source_names(self) -> list[str]:
        """What the sources of scores are called in --reward_weights, metrics and samples."""
        return [kind.name or value.rpartition(":")[2] for kind, value in self.sources]

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each source of scores, by its name."""
        weights = dict.fromkeys(self.source_names, 1.0)
        for item in self.reward_weights or []:
            name, _, number = item.partition("=")
            weights[name] = float(number)
        return weights

    @property
    def formula(self) -> str:
        """How the score is made up, such as `score = 1 × judge + 0.5 × environment`."""
        terms = [f"{weight:g} × {name}" for name, weight in self.weights.items()]
        return f"score = {' + '.join(terms)}".replace("+ -", "− ")

    @property
    def criterion_names(self) -> list[str]:
        """What the judge's points on each criterion are called in metrics and samples."""
        if self.reward_judge is None:
            return []
        rubric = resolve_name(READ_RUBRIC)(self.reward_judge, "--reward_judge")
        return [] if rubric.ranks else [f"{JUDGED}{name}" for name in rubric.criteria]

    @property
    def score_remedies(self) -> dict[str, str]:
        """What to do about numbers that are not finite, by name: scores where there is one source, else its own."""
        flags = [f"--{kind.flag} {value}" for kind, value in self.sources]
        names = self.source_names if self.are_named else ["scores"] * len(flags)
        skip = "" if self.on_reward_error == "skip" else " --on_reward_error skip leaves such responses out."
        remedies = {name: f"{flag} must give finite numbers.{skip}" for name, flag in zip(names, flags, strict=True)}
        if self.metric_name is not None:
            remedies[self.metric_name] = f"--metric_function {self.metric_function} must give finite numbers."
        return remedies


def _check_functions(config: Any) -> None:
    rewards = config.rewards
    for spec in rewards.reward_function or []:
        check_function_path("reward_function", spec)
    if rewards.metric_function is not None:
        check_function_path("metric_function", rewards.metric_function)


def _check_weights(config: Any) -> None:
    items = config.rewards.reward_weights or []
    names = config.rewards.source_names
    unweighted = list(names)
    for item in items:
        name, _, number = item.partition("=")
        if not names:
            raise UserError(f"--reward_weights {item}: there is no source of scores: drop it.")
        if name not in unweighted or not _is_finite(number):
            raise UserError(
                f"--reward_weights {' '.join(items)}: give finite weights as NAME=NUMBER, each name once, such as"
                f" --reward_weights {' '.join(f'{name}=0.5' for name in names)}"
            )
        unweighted.remove(name)


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _repeated_name(config: Any) -> str | None:
    """The first name that two numbers of a response would have in metrics and samples; None if there is none."""
    rewards = config.rewards
    names = [*dict.fromkeys(METRIC_NAMES), *rewards.criterion_names]
    if rewards.metric_name is not None:
        names.append(rewards.metric_name)
    if rewards.are_named:
        names += rewards.source_names
    for name, count in Counter(names).items():
        if count > 1:
            return name
    return None


REWARD_RULES: tuple[Rule[Any] | Check[Any], ...] = (  # of step 3's configuration
    Check(_check_functions),
    Check(_check_weights),
    Rule(
        lambda config: _repeated_name(config) is not None,
        "two numbers of a response would be called {name}: rename the function (--reward_function, --metric_function),"
        " or the criterion of --reward_judge.",
        words=lambda config: {"name": _repeated_name(config)},
    ),
    Rule(
        lambda config: config.rewards.reward_url is not None and not ADDRESS.fullmatch(config.rewards.reward_url),
        "--reward_url {reward_url} is not an address: give one such as http://127.0.0.1:8500/score, without a user's"
        " name, password or query.",
    ),
    Rule(
        lambda config: (
            config.rewards.reward_url is not None
            and config.rewards.reward_timeout + config.rewards.reward_patience >= config.engine.ddp_timeout
        ),
        "--reward_timeout {reward_timeout:g} and --reward_patience {reward_patience:g} are together not below"
        " --ddp_timeout {ddp_timeout}, after which the other processes stop waiting: lower them, or raise it.",
    ),
)


def longest_rollout(config: Any) -> float:
    """Seconds in which the questions of a rollout must be answered: other processes wait for them."""
    return PATIENCE * float(config.engine.ddp_timeout)


def _has_inner_rewards(config: Any) -> bool:
    """Whether turns or macro actions have rewards of their own, whose sum is the score of the response."""
    return bool(config.has_episodes or config.rewards.segment_rewards is not None)


def _words_of_inner_rewards(config: Any) -> dict[str, object]:
    if config.has_episodes:
        return {"flag": "--environment", "remedy": "use rloo, grpo or another estimator that compares whole responses"}
    return {"flag": "--segment_rewards", "remedy": "drop --segment_rewards"}


# Rewards of turns and, with --segment_rewards, of macro actions.
INNER_REWARD_RULES: tuple[Rule[Any], ...] = (
    Rule(
        lambda config: (
            config.advantages.drop_equal_groups
            and _has_inner_rewards(config)
            and "gamma" in config.advantages.needs.reads
        ),
        "{flag} with --drop_equal_groups compares the sums of responses' rewards, but with --advantage_estimator"
        " {advantage_estimator} a reward counts where it is earned, so that equal sums may differ inside: drop"
        " --drop_equal_groups, or {remedy}.",
        words=_words_of_inner_rewards,
    ),
    Rule(
        lambda config: config.estimator.clip_reward_value is not None and _has_inner_rewards(config),
        "{flag} with --clip_reward_value {clip_reward_value:g} clips the sum of a response's rewards, and takes what"
        " is above it from the last one, whichever earned it: clip the rewards in the environment's step or in the"
        " source of scores, and give --clip_reward_value none.",
        words=_words_of_inner_rewards,
    ),
)
