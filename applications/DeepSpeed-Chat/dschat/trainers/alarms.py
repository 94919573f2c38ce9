# SPDX-License-Identifier: Apache-2.0
"""Signs that a policy has found a way around its reward, read off a rollout's metrics; each is one line in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dschat.config.batches import BatchPlan
from dschat.config.ppo import PPOConfig
from dschat.run.distributed import is_main
from dschat.run.metrics import after
from dschat.run.state import Json

logger = logging.getLogger(__name__)

LARGEST_CORRELATION = 0.9
ENOUGH_ROWS = 32  # of a rollout on all ranks; in fewer a correlation this large may be chance
LARGEST_REPETITION = 0.5
SMALLEST_EXPLAINED_VARIANCE = -1.0
FEW_TOKENS = 8  # mean length of responses that are hardly more than a word
SHRUNK_TO = 0.25  # part of the first rollout's mean length
USUAL_INTERVAL = 50  # updates, without --eval_interval

Metrics = Mapping[str, float]


def kl_alarm(metrics: Metrics, max_kl: float | None) -> str | None:
    """The policy has moved further from the reference than --max_kl allows."""
    kl = metrics["objective/kl"]
    if max_kl is None or kl <= max_kl:
        return None
    return f"the KL to the reference is {kl:.3g} nats per sequence, above --max_kl {max_kl:g}"


def length_alarm(metrics: Metrics, rows: int) -> str | None:
    """Scores follow the length of responses. ``rows`` are those of the rollout on all ranks."""
    correlation = metrics["response/score_length_correlation"]
    if rows < ENOUGH_ROWS or abs(correlation) <= LARGEST_CORRELATION:
        return None
    return f"scores follow the length of responses (correlation {correlation:.2f}): the policy may learn length alone"


def repetition_alarm(metrics: Metrics) -> str | None:
    """Responses repeat themselves."""
    share = metrics["response/repetition"]
    return f"responses repeat themselves ({share:.0%} of their 4-grams)" if share > LARGEST_REPETITION else None


def eos_alarm(metrics: Metrics, ended_before: bool) -> str | None:
    """Responses do not end any more, though they did (``ended_before``)."""
    if metrics["response/eos_rate"] > 0 or not ended_before:
        return None
    return "no response ends with EOS any more: all are cut at --max_answer_seq_len"


def short_alarm(metrics: Metrics, first_length: float | None) -> str | None:
    """Responses have become much shorter than in the first rollout (mean ``first_length`` in tokens, if known)."""
    length = metrics["response/length"]
    if first_length is None:
        return None
    is_short = length <= SHRUNK_TO * first_length or (length <= FEW_TOKENS and length <= first_length / 2)
    if not is_short:
        return None
    return (
        f"responses have become short: {length:.1f} tokens on average, {first_length:.1f} in the first rollout. The"
        " policy may learn to stop at once: a smaller --missing_eos_penalty, or a longer --max_answer_seq_len, in"
        " which responses end by themselves, pays less for that"
    )


def critic_alarm(metrics: Metrics) -> str | None:
    """The critic's values, where there is a critic, are further from the returns than their mean is."""
    explained = metrics.get("val/explained_variance")
    if explained is None or explained >= SMALLEST_EXPLAINED_VARIANCE:
        return None
    return f"the critic's values are worse than a constant (explained variance {explained:.2f})"


def count_alarm(metrics: Metrics) -> str | None:
    """No token is left that the policy's loss is of."""
    if metrics.get("policy/counted") != 0:
        return None
    return (
        "no token counts in the policy's loss: see --drop_equal_groups (all scores equal?) and --max_token_probability"
    )


class Alarms:
    """Reads the metrics of every iteration; each alarm is logged at most once in so many updates."""

    def __init__(self, max_kl: float | None, stops: bool, interval: int, rows: int) -> None:
        """Takes --max_kl in nats, whether a KL above it ends the run, updates between two lines of the same alarm, and
        the rows of a rollout on all ranks.
        """
        self._max_kl, self._stops, self._interval, self._rows = max_kl, stops, interval, rows
        self._logged: dict[str, int] = {}  # alarm → after how many updates it was logged last
        self._ended = False  # a response has ended with EOS
        self._first_length: float | None = None  # mean length of the first rollout's responses, in tokens

    @classmethod
    def from_config(cls, config: PPOConfig, plan: BatchPlan) -> Alarms:
        interval = config.eval_interval or USUAL_INTERVAL
        return cls(config.max_kl, config.kl_action == "stop", interval, plan.global_responses)

    def check(self, metrics: Metrics, update: int, may_stop: bool = True) -> str | None:
        """Logs what is wrong after so many updates; returns why the run must end, if it must.

        The metrics are an iteration's, the same on every rank; one whose rollout was left out has none to look at.
        `may_stop`: there is more to come that a stop would spare.
        """
        if "objective/kl" not in metrics:
            return None
        found = {
            "kl": kl_alarm(metrics, self._max_kl),
            "length": length_alarm(metrics, self._rows),
            "repetition": repetition_alarm(metrics),
            "eos": eos_alarm(metrics, self._ended),
            "short": short_alarm(metrics, self._first_length),
            "critic": critic_alarm(metrics),
            "counted": count_alarm(metrics),
        }
        self._ended = self._ended or metrics["response/eos_rate"] > 0
        if self._first_length is None:
            self._first_length = metrics["response/length"]
        stops = self._stops and may_stop and found["kl"] is not None
        for name, sentence in found.items():
            if sentence is not None and not (stops and name == "kl"):
                self._log(name, f"{after(update)}, {sentence}", update)
        if not stops:
            return None
        return f"{after(update)}, {found['kl']}. Models and a checkpoint are saved: raise --max_kl to go on."

    def state_dict(self) -> Json:
        return {"logged": self._logged, "ended": self._ended, "first_length": self._first_length}

    def load_state_dict(self, state: Json) -> None:
        self._logged = dict(state["logged"])
        self._ended = state["ended"]
        self._first_length = state["first_length"]

    def _log(self, name: str, message: str, update: int) -> None:
        last = self._logged.get(name)
        if last is None or update - last >= self._interval:
            self._logged[name] = update
            if is_main():
                logger.warning("%s", message)
