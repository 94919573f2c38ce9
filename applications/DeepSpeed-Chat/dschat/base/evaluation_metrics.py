# SPDX-License-Identifier: Apache-2.0
"""Metrics of evaluations, on held-out rows."""

from dataclasses import replace

from dschat.base.metric import (
    ALL,
    EPISODES,
    JUDGE,
    JUDGE_PRICES,
    KL,
    ONLINE,
    PROGRAMS,
    SEVERAL,
    SKIP,
    SUPERVISED,
    TEACHER,
    Metric,
)
from dschat.base.update_metrics import LOSSES


def _evaluation_of(metric: Metric) -> Metric:
    """The metric of held-out rows that corresponds to one of training."""
    name = metric.name.replace("train/", "eval/")
    return replace(metric, name=name, meaning=f"`{metric.name}` of held-out rows", worry="")


EVALUATIONS = (
    Metric("eval/rows", ALL, unit="rows", meaning="held-out rows of the evaluation", worry="below 30, with a warning"),
    Metric(
        "eval/<metric>_stderr",
        ALL,
        unit="as the metric",
        meaning="standard error of `eval/<metric>` over these rows, tokens of one row and replies of one dialogue"
        " taken together; from two rows on",
        worry="a difference of two evaluations within twice this is none",
    ),
    Metric(
        "eval/loss",
        SUPERVISED,
        unit="as above",
        meaning="the same loss as in training; SFT's without label smoothing",
        worry="it rises while the training loss falls: fewer epochs",
    ),
    Metric("eval/perplexity", "sft", unit="", meaning="exp of the loss"),
    *[_evaluation_of(metric) for metric in LOSSES if metric.name.startswith("train/")],
    Metric(
        "eval/scores",
        ONLINE,
        unit="score",
        meaning="mean score; of dialogues after the last turn",
        worry="it falls while `objective/scores` rises: what is learnt does not carry over",
    ),
    Metric("eval/scores_turn_<number>", "refuel_online", unit="score", meaning="of the dialogues up to that turn"),
    Metric("eval/kl", "ppo", unit="nats per response", meaning="KL to the reference", worry="as `objective/kl`"),
    Metric(
        "eval/kl",
        "refuel_online",
        unit="nats per reply",
        meaning="KL to the reference",
        worry="as `objective/kl`",
        when=KL,
    ),
    Metric("eval/kl_per_token", "ppo", unit="nats per token", meaning="the same over all tokens"),
    Metric("eval/kl_per_token", "refuel_online", unit="nats per token", meaning="the same over all tokens", when=KL),
    Metric("eval/length", ONLINE, unit="tokens", meaning="mean length"),
    Metric("eval/eos_rate", ONLINE, unit="share", meaning="as `response/eos_rate`"),
    Metric("eval/<source>", "ppo", unit="", meaning="as `objective/<source>`", when=SEVERAL),
    Metric("eval/unscored", "ppo", unit="share", meaning="as `objective/unscored`", when=SKIP),
    Metric("eval/programs/<outcome>", "ppo", unit="share", meaning="as `programs/<outcome>`", when=PROGRAMS),
    Metric(
        "eval/programs/tests_per_second",
        "ppo",
        unit="tests per s",
        meaning="as `programs/tests_per_second`",
        when=PROGRAMS,
    ),
    Metric("eval/programs/seconds", "ppo", unit="s", meaning="as `programs/seconds`", when=PROGRAMS),
    Metric(
        "eval/judge_<criterion>",
        "ppo",
        unit="share of 10 points",
        meaning="as `objective/judge_<criterion>`",
        when=JUDGE,
    ),
    Metric("eval/teacher_kl", "ppo", unit="nats per response", meaning="as `teacher/kl`", when=TEACHER),
    Metric("eval/judge/cached", "ppo", unit="share", meaning="as `judge/cached`", when=JUDGE),
    Metric("eval/judge/cost", "ppo", unit="US dollars per response", meaning="as `judge/cost`", when=JUDGE_PRICES),
    Metric("eval/episode/turns", "ppo", unit="turns", meaning="as `episode/turns`", when=EPISODES),
    Metric("eval/episode/done", "ppo", unit="share", meaning="as `episode/done`", when=EPISODES),
    Metric("eval/episode/cut_turns", "ppo", unit="share", meaning="as `episode/cut_turns`", when=EPISODES),
    Metric(
        "eval/episode/environment_tokens",
        "ppo",
        unit="tokens",
        meaning="as `episode/environment_tokens`",
        when=EPISODES,
    ),
)
