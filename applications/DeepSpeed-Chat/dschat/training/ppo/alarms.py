# SPDX-License-Identifier: Apache-2.0
"""Alarms: warnings in the log if a rollout's metrics suggest that the policy games its reward."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dschat.run.distributed import is_main
from dschat.run.metrics import after
from dschat.run.state import Json
from dschat.settings.ppo_loss import AlarmFlags

logger = logging.getLogger(__name__)

LARGEST_CORRELATION = 0.9
ENOUGH_ROWS = 32  # with fewer responses per rollout, on all ranks, a large correlation may be chance
LARGEST_REPETITION = 0.5
SMALLEST_EXPLAINED_VARIANCE = -1.0
FEW_TOKENS = 8  # responses of this mean length are short in any task
SHRUNK_TO = 0.25  # responses are short at this share of the first rollout's mean length
ENOUGH_SCORES = 8  # with fewer scores per rollout, on all ranks, their standard deviation means little
SMALLEST_KL = 1.0  # nats per response that the scale alarm assumes at least: before training the KL is 0
USUAL_INTERVAL = 50  # updates between two lines of an alarm without --eval_interval

Metrics = Mapping[str, float]


def kl_alarm(metrics: Metrics, max_kl: float | None) -> str | None:
    """Warning that the KL to the reference exceeds --max_kl."""
    kl = metrics["objective/kl"]
    if max_kl is None or kl <= max_kl:
        return None
    return f"the KL to the reference is {kl:.3g} nats per sequence, above --max_kl {max_kl:g}"


def length_alarm(metrics: Metrics, rows: int) -> str | None:
    """Warning that scores correlate with response length. ``rows`` is the number of responses on all ranks."""
    correlation = metrics["response/score_length_correlation"]
    if rows < ENOUGH_ROWS or abs(correlation) <= LARGEST_CORRELATION:
        return None
    return f"scores follow the length of responses (correlation {correlation:.2f}): the policy may learn length alone"


def repetition_alarm(metrics: Metrics) -> str | None:
    """Warning that responses repeat themselves."""
    share = metrics["response/repetition"]
    return f"responses repeat themselves ({share:.0%} of their 4-grams)" if share > LARGEST_REPETITION else None


def eos_alarm(metrics: Metrics, ended_before: bool) -> str | None:
    """Warning that no response ends with EOS any more, although some did before (``ended_before``)."""
    if metrics["response/eos_rate"] > 0 or not ended_before:
        return None
    if "episode/turns" in metrics:
        return "no episode is finished any more: --max_turns, --max_answer_seq_len or --max_turn_seq_len cut them all"
    return "no response ends with EOS any more: all are cut at --max_answer_seq_len"


def short_alarm(metrics: Metrics, first_length: float | None) -> str | None:
    """Warning that responses are much shorter than in the first rollout, whose mean length is ``first_length``."""
    length = metrics["response/length"]
    if first_length is None:
        return None
    is_short = length <= SHRUNK_TO * first_length or (length <= FEW_TOKENS and length <= first_length / 2)
    if not is_short:
        return None
    return (
        f"responses have become short: {length:.1f} tokens on average, {first_length:.1f} in the first rollout. The"
        " policy may learn to stop at once. Stopping early pays less with a smaller --missing_eos_penalty, or with a"
        " larger --max_answer_seq_len, so that fewer responses are cut"
    )


def critic_alarm(metrics: Metrics) -> str | None:
    """Warning that the critic predicts returns worse than a constant would. Never given without a critic."""
    explained = metrics.get("val/explained_variance")
    if explained is None or explained >= SMALLEST_EXPLAINED_VARIANCE:
        return None
    return f"the critic's values are worse than a constant (explained variance {explained:.2f})"


def count_alarm(metrics: Metrics) -> str | None:
    """Warning that the policy's loss counts no token."""
    if metrics.get("policy/counted") != 0:
        return None
    return (
        "no token counts in the policy's loss: see --drop_equal_groups (all scores equal?) and --max_token_probability"
    )


def spread_of(metrics: Metrics) -> float:
    """Standard deviation of a rollout's scores, after normalisation if scores are normalised in training."""
    spread = metrics.get("objective/scores_std", 0.0)
    deviation = metrics.get("objective/scores_running_std", 1.0)
    return spread / deviation if deviation > 0 else 0.0


def scale_alarm(
    metrics: Metrics,
    spread: float,
    rows: int,
) -> str | None:
    """Warning that the KL penalty outweighs the differences between scores, so that the policy stays at the reference.

    For Gaussian scores with standard deviation s and a KL coefficient β, the best policy has a KL of s² / (2 β²) nats,
    half a nat if s = β. A KL below one nat counts as one nat, so that the first rollout already shows a scale that is
    too small.

    Args:
        metrics: metrics of an iteration.
        spread: largest `spread_of` so far. Scores of a trained policy may all be high; then they differ less.
        rows: rows of a rollout on all ranks.
    """
    kl = max(metrics["objective/kl"], SMALLEST_KL)
    coefficient = metrics.get("objective/kl_coef", 0.0)
    if rows < ENOUGH_SCORES or spread >= coefficient * kl:
        return None
    remedy = "a smaller --kl_ctl"
    if "objective/scores_running_std" not in metrics:
        remedy = "--normalize_scores, a smaller --kl_ctl, or a reward model with a larger margin (step 2)"
    return (
        f"the KL penalty outweighs the scores: their standard deviation is {spread:.2g}, and --kl_ctl"
        f" {coefficient:.2g} × {kl:.2g} nats = {coefficient * kl:.2g}. The policy gains more by staying at the"
        f" reference than by better scores. Try {remedy}"
    )


class Alarms:
    """Reads the metrics of every iteration; each alarm is logged at most once per interval."""

    def __init__(
        self,
        flags: AlarmFlags,
        interval: int,
        rows: int,
        checks_scale: bool = True,
    ) -> None:
        """Prepares the warnings of a run.

        Args:
            flags: --max_kl in nats, and --kl_action, what happens above it.
            interval: updates between two lines of the same alarm.
            rows: responses of a rollout on all ranks.
            checks_scale: whether to compare the scale of scores with the KL penalty.
        """
        self._flags = flags
        self._interval = interval
        self._rows = rows
        self._checks_scale = checks_scale
        self._spread = 0.0  # largest spread of scores so far
        self._logged: dict[str, int] = {}  # alarm → updates before it was last logged
        self._ended = False  # a response has ended with EOS
        self._first_length: float | None = None  # mean length of the first rollout's responses, in tokens

    def check(
        self,
        metrics: Metrics,
        update: int,
        may_stop: bool = True,
    ) -> str | None:
        """Logs alarms. Returns why the run must stop, or None.

        Args:
            metrics: metrics of an iteration, equal on every rank; without those of a rollout if it was skipped.
            update: number of updates so far.
            may_stop: False in the last iteration, after which the run ends anyway.
        """
        if "objective/kl" not in metrics:
            return None
        self._spread = max(self._spread, spread_of(metrics))
        alarms = {
            "kl": kl_alarm(metrics, self._flags.max_kl),
            "length": length_alarm(metrics, self._rows),
            "repetition": repetition_alarm(metrics),
            "eos": eos_alarm(metrics, self._ended),
            "short": short_alarm(metrics, self._first_length),
            "critic": critic_alarm(metrics),
            "counted": count_alarm(metrics),
            "scale": scale_alarm(metrics, self._spread, self._rows) if self._checks_scale else None,
        }
        self._ended = self._ended or metrics["response/eos_rate"] > 0
        if self._first_length is None:
            self._first_length = metrics["response/length"]
        stops = self._flags.kl_action == "stop" and may_stop and alarms["kl"] is not None
        for name, sentence in alarms.items():
            if sentence is not None and not (stops and name == "kl"):
                self._log(name, f"{after(update)}, {sentence}", update)
        if not stops:
            return None
        return f"{after(update)}, {alarms['kl']}. Models and a checkpoint are saved: raise --max_kl to continue."

    def state_dict(self) -> Json:
        return {
            "logged": self._logged,
            "ended": self._ended,
            "first_length": self._first_length,
            "spread": self._spread,
        }

    def load_state_dict(self, state: Json) -> None:
        self._logged = dict(state["logged"])
        self._ended = state["ended"]
        self._first_length = state["first_length"]
        self._spread = state["spread"]

    def _log(
        self,
        name: str,
        message: str,
        update: int,
    ) -> None:
        last = self._logged.get(name)
        if last is None or update - last >= self._interval:
            self._logged[name] = update
            if is_main():
                logger.warning("%s", message)
